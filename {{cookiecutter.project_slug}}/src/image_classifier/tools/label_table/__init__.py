"""Labels from a table, CSV, JSON lines or Parquet: `--data.labels`."""
