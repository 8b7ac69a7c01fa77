"""CIFAR-10 and CIFAR-100, recipes for them, and the networks of airbench."""
