"""Resolve: ids become slots, here and nowhere else."""
