"""Rows in the memory of the host, which the core computes on."""
