"""The command `ray-train`: trains in the workers of a Ray cluster, which restarts them."""
