"""The `prepare` command."""
