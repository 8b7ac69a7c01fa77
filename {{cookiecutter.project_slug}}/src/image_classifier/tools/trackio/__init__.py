"""The tracker trackio."""
