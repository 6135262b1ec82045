"""Programs for those who work on Hotbed."""
