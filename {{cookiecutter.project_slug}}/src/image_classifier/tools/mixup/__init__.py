"""`--augment.mixup` and `--augment.cutmix`: training images are mixed in pairs, as are labels."""
