"""Unreadable images that training passes over, for `--data.on-bad-image skip`."""
