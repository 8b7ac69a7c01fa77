"""Which number format trains a network faster on this CPU, for `--precision auto`."""
