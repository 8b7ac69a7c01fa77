"""Which rank hangs or was killed, and where it was.

Without this tool, a run of which a rank hangs ends, but is not started again.
"""
