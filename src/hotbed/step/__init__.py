"""A step of an optimizer: decide, apply, tell; the same for the host and for devices."""
