"""`--compute.gradient-checkpointing`: less memory for activations, which are computed twice."""
