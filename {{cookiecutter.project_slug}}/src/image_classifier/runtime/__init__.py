"""Processes, devices, seeds, signals and files."""
