"""Rows in tiers whose uppermost is the memory of a device."""
