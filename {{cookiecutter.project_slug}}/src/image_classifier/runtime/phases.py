"""The phases of a step, by the names that a profiler shows."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import record_function

PHASES = ("wait for data", "copy", "augment", "forward", "backward", "optimizer")


def phase(name: str) -> AbstractContextManager:
    """A block that shows as `name` in a profiler, and costs nothing while there is none."""
    assert name in PHASES, name
    return record_function(name) if torch.autograd._profiler_enabled() else nullcontext()
