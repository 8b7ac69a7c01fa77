"""FSDP: each rank keeps a part of all weights, for models that do not fit into one GPU.

Without this tool, every rank has all weights, and a run that saved sharded weights can't resume.
"""
