"""The optimizer Muon, and the preset `folder` with it."""
