"""The `find-batch` command."""
