"""The phases of a training step, as a profiler shows them."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import record_function

NO_PHASE = nullcontext()
PHASES = ("wait for data", "copy", "augment", "forward", "backward", "optimizer")


def phase(name: str) -> AbstractContextManager:
    """A block that a profiler shows as `name`, one of PHASES; costs nothing without a profiler."""
    assert name in PHASES, name
    return record_function(name) if torch.autograd._profiler_enabled() else NO_PHASE
