"""Datasets that the library `datasets` of Hugging Face has saved: `--data.name huggingface`."""
