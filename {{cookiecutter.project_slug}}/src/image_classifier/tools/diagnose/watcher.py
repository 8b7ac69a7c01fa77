"""Watches for ranks that are gone, and for memory that runs out."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...checkpoints import TrainState
from ...tracking import Setup
from . import heartbeat, memory


@contextmanager
def watch(setup: Setup, state: TrainState) -> Iterator[Callable[[], None]]:
    """A block whose faults are explained, on every rank; after a step there is nothing to do.

    Raises:
        LostError: in place of an error that only says that another rank is gone; it names the rank.
    """
    with heartbeat.watch(setup, state), memory.watch(setup, state):
        yield lambda: None
