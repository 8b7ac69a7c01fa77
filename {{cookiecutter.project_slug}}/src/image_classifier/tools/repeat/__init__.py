"""The tool `repeat`: a recipe over several seeds."""
