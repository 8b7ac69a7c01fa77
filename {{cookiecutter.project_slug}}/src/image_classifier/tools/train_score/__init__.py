"""The score on training images beside that on validation images, and the hardest of them."""
