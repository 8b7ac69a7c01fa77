"""The tracker MLflow."""
