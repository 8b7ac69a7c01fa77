"""Calibrates probabilities, and abstains where the model is not sure enough."""
