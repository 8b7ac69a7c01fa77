"""The `compare` command."""
