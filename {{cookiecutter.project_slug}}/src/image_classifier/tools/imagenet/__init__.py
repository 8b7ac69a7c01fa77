"""Presets for ImageNet, from published recipes, and a plain vision transformer."""
