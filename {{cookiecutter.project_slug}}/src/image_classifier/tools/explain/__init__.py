"""Heat maps of what a model looked at, for the report page and `predict --explain`."""
