"""Augmentation that fits the images: turns, colors, blur, your own; the command `preview`."""
