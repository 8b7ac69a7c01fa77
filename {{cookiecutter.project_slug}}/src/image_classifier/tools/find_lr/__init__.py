"""The `find-lr` command."""
