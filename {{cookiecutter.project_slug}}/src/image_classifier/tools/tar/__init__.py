"""Datasets of tar shards in the WebDataset layout."""
