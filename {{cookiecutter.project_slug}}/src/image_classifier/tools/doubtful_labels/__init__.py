"""The command `doubtful-labels`: finds images that probably have a wrong label."""
