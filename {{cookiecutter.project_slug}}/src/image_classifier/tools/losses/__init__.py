"""Losses for several labels, in which easy negatives count less: focal and asymmetric."""
