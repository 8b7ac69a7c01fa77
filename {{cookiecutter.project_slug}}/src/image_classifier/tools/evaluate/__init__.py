"""The `evaluate` command."""
