"""The tool `compare`: whether the difference between runs is more than chance."""
