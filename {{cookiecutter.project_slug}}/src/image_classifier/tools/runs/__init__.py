"""Several runs: `repeat` over seeds, `cross-validate` over folds, `compare` with each other."""
