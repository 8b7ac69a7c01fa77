"""What to say after a fault: which rank hangs or was killed, and what takes the memory.

Without this tool, a run of which a rank hangs ends, but is not started again.
"""
