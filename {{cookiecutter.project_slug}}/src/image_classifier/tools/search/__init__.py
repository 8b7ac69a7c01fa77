"""The command `search`: searches for better options; bad trials end early."""
