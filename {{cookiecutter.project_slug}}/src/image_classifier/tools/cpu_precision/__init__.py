"""Measures whether bf16 trains a network faster on this CPU, for `--precision auto`."""
