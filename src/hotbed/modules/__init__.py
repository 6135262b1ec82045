"""What the modules that own tables have in common, and how they take over stock layers."""
