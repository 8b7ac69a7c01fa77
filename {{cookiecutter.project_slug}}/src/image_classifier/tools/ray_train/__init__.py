"""`ray-train`: the same run in the workers of a Ray cluster, which restarts them."""
