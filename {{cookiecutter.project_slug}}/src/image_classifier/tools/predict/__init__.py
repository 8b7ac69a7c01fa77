"""The tool `predict`: labels for new images, on the screen or in a file."""
