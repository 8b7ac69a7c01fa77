"""The tool `cross-validate`: every image validated once, over K folds."""
