"""The command `probe`: scores pretrained weights on your images by a linear probe."""
