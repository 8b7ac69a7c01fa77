"""The `search` command."""
