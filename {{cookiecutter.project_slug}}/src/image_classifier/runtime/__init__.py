"""Runtime: processes, devices, seeds, signals, faults and files. Its modules are its face."""
