"""A page for each search: its trials, how they learned, and which options matter."""
