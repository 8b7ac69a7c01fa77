"""Presets for ImageNet, from published recipes."""
