"""Datasets of tar files in the WebDataset layout, here or behind a URL: `--data.name tar`."""
