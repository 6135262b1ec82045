"""Common parts of the modules that own tables, and how they take over stock layers."""
