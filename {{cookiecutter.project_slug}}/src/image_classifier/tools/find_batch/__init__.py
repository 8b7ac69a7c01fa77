"""The command `find-batch`: the largest micro-batch that fits, and the smallest fast one."""
