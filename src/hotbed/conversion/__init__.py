"""Models of others: their embedding layers become layers over Hotbed's tables, in place."""
