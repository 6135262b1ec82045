"""A live table: its handle, its gradient, its records, and what its place must do."""
