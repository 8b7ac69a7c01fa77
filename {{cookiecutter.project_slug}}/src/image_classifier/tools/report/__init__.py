"""The report page of a run."""
