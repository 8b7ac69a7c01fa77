"""Pictures of a run, which trackers and pages show."""
