"""The tool `probe`: how good the features of trained weights are, in a minute on a CPU."""
