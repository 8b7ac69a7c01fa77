"""Commands beside training, trackers and the report page: any of them can be deleted."""
