"""Which images a score is of: groups that stay together, and a test part that is scored once."""
