"""Datasets that are torch's: any map-style `Dataset` of (image, label)."""
