"""Datasets of the library `datasets` of Hugging Face."""
