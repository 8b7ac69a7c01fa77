"""The command `ensemble`: several runs, such as the folds of `cross-validate`, as one model."""
