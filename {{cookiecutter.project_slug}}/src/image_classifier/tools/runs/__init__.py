"""The commands `repeat`, `cross-validate` and `compare`: several runs and their statistics."""
