"""Tiers below the memory that computes: who shares them, their folder, batches made ready for them."""
