"""Labels from a table, CSV or JSON lines: `--data.labels`."""
