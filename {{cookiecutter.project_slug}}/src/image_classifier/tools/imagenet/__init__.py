"""Presets for ImageNet, from published recipes."""

NEEDS = ("policies",)  # another tool: RandAugment, of `imagenet_vit_s`
