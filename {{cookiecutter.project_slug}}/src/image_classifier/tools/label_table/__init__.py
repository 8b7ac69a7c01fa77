"""Labels of your own images from a table."""
