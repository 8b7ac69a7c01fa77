"""Which rank hangs or was killed, and where it was."""
