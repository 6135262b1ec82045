"""Look-ahead: batches are read, and their rows brought up, before they are asked for."""
