"""The same step through Hotbed, torch and FBGEMM: one adapter a file."""
