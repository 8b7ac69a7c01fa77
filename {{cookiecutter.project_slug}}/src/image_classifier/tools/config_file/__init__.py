"""A config as a file, and the command that trains a run again, with what differs today."""
