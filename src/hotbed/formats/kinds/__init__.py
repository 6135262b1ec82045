"""Formats of tables: a module each, named as users name it, whose ``FORMAT`` reads it and may write it."""
