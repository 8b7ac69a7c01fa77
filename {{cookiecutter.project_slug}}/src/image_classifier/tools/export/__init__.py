"""The `export` command."""
