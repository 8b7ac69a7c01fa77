"""The command `predict`: labels new images, on the screen or in a file."""
