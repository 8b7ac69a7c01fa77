"""Processes, devices, seeds, signals, faults and files: what each module is for, it says itself."""
