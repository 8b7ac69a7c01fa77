"""Finds copies for `check`: pictures that were saved again, scaled, cropped or made brighter."""
