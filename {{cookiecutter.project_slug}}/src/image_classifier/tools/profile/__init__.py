"""`--profile`: a few steps recorded by torch.profiler."""
