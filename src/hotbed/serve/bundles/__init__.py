"""Bundles: their files, as they are written and read."""
