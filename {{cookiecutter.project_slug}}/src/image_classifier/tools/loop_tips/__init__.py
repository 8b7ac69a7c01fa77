"""Adds to `bench` the tips on how a training loop is written, which no option switches."""
