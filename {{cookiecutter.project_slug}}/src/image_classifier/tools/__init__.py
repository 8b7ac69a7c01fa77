"""Commands beside training, trackers, observers, the report page: any of them can be deleted."""
