"""The commands `repeat` and `compare`: several runs and their statistics."""
