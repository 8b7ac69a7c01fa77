"""Writes a model card from a run, in the form that Hugging Face reads."""
