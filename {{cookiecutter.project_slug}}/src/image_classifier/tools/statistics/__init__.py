"""Whether a difference is more than chance: for tools that compare runs, or stages of one."""
