"""The command `check`: finds unreadable files, leakage between splits, conflicting labels."""
