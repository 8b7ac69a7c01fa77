"""The `predict` command."""
