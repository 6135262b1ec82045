"""Tables that are looked up together: the one lookup, the one pool."""
