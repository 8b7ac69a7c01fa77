"""Commands beside training: any of them can be deleted."""
