"""The tracker Weights & Biases."""
