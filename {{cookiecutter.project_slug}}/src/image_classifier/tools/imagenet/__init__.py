"""Presets for ImageNet, from published recipes, and a plain vision transformer."""

NEEDS = ("policies",)  # another tool: RandAugment, of `imagenet_vit_s`
