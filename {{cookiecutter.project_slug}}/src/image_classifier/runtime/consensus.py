"""Ranks agree on what happens after a step, such as a save or the end, without waiting for it."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from .distributed import World

EXCHANGE_SECONDS = 0.5  # about how often ranks tell each other what has come up


class AsyncConsensus:
    """Exchanges whole numbers: at the same step, all ranks learn the largest over all ranks.

    Ranks read at one exchange what they handed in at the one before, so no rank waits. The exchange
    runs between hosts (gloo): it notices a rank that hangs, whatever its GPU still has queued.
    """

    def __init__(self, world: World, timeout_seconds: float, step: int = 0) -> None:
        """Ranks of `world`, after `step` steps, give up on each other after `timeout_seconds`."""
        self.world = world
        self.next_step = step
        self.pending: tuple[Tensor, dist.Work] | None = None
        self.last = (step, time.monotonic())  # step and time of the last exchange
        if world.size > 1:
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))

    def max(self, step: int, *numbers: int) -> list[int]:
        """The largest of each of `numbers` over all ranks, as of the exchange before `step`.

        Zeros after most steps: ranks exchange about twice per second.
        """
        if self.world.size == 1:
            return list(numbers)
        if step < self.next_step:
            return [0] * len(numbers)
        known = [0] * len(numbers)
        interval = 1
        if self.pending is not None:
            tensor, work = self.pending
            work.wait()
            *known, interval = tensor.tolist()
        tensor = torch.tensor([*numbers, self.interval(step) if self.world.is_main else 0])
        work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
        self.pending = (tensor, work)
        self.next_step = step + interval
        return known

    def interval(self, step: int) -> int:
        """Steps until the next exchange, from the time that steps took since the last one."""
        last_step, last_time = self.last
        self.last = (step, time.monotonic())
        seconds = max(self.last[1] - last_time, 1e-3)  # the clock of Windows stands still for 16 ms
        return max(1, round(EXCHANGE_SECONDS * (step - last_step) / seconds))

    def finish(self) -> None:
        """Complete the last exchange, as all ranks do that reach the end of the run."""
        if self.pending is not None:
            self.pending[1].wait()
