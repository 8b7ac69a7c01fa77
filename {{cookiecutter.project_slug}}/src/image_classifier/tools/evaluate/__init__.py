"""The command `evaluate`: scores the best weights of a run on any split or folder."""
