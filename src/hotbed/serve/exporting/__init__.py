"""Models as bundles."""
