"""Augmentation that fits the images: turns, flips, colors, blur, your own; the command `preview`."""
