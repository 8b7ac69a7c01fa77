"""A linear probe, with which fine-tuning begins: a last layer fitted to features."""
