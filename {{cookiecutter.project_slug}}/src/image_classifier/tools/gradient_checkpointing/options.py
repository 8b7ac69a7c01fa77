"""`--compute.gradient-checkpointing`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CheckpointingOptions:
    """Whether blocks recompute."""

    gradient_checkpointing: bool = False  # keep only the inputs of each block, and compute the rest
    # again in the backward pass: less memory, slower, the same results


SECTIONS = {"compute": CheckpointingOptions}
FREE_TO_CHANGE = ("compute.gradient_checkpointing",)
