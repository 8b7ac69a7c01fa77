"""CIFAR-10 and CIFAR-100, and recipes for them."""
