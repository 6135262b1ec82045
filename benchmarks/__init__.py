"""Benchmarks: one scenario a file, peers as adapters. Run `python -m benchmarks`."""
