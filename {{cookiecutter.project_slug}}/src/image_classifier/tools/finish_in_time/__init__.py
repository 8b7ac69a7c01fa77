"""Finishes a run within a time limit: the learning rate decays by the clock."""
