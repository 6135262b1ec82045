"""Rows of a bundle that are split over processes; see docs/serving.md."""
