"""Readings of the GPUs by NVML."""
