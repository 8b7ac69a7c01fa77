"""The command `cross-validate`: K runs, so that each image is validated once."""
