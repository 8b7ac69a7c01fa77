"""Losses that are inf or nan: found on the device in every step, without waiting for it."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from .config import FaultError, RunConfig
from .data import TrainData
from .runtime.files import read_rows
from .runtime.run_dir import append_lines, forget_rows_after

NONFINITE = "nonfinite.jsonl"
RING = 1024  # steps that the host may be ahead of the device
PENDING = -1.0
MOST_IN_A_ROW = 20  # overflows, after which even a scaler will find no range for the gradients


class FiniteCheck:
    """Counts the steps that `Precision.step` passed over, as their gradients were not finite.

    Gradients are the same on every rank, and so are the steps that it finds.
    """

    def __init__(
        self,
        run: RunConfig,
        model: nn.Module,
        data: TrainData,
        lr_at: Callable[[int], float],
        *,
        scales: bool,
        step: int,
    ) -> None:
        """For a run on `data` that goes on from `step`.

        With `scales`, fp16's scaler is meant to overflow now and then.
        """
        self.path, self.data, self.lr_at = Path(run.dir, NONFINITE), data, lr_at
        self.skips = run.on_nonfinite == "skip" or scales
        kind = data.world.device.type
        ring = torch.full((RING,), PENDING, pin_memory=kind == "cuda")
        self.seen = ring.numpy()
        self.slots = ring.unbind() if kind != "cpu" else ()
        self.num_skipped, self.in_a_row = self.forget_after(step), 0  # that the host knows of
        self.read_step: int | None = None  # the next step whose answer is awaited
        # BatchNorm's statistics are spoiled by the forward pass already.
        buffers = [b for b in model.buffers() if b.is_floating_point()]
        self.buffers = buffers if run.on_nonfinite == "skip" else []
        self.kept = [buffer.clone() for buffer in self.buffers]

    def forget_after(self, step: int) -> int:
        """Drop the rows on steps that will be made again; how many are left."""
        if self.data.world.is_main:
            forget_rows_after(self.path, step)
        return len(read_rows(self.path)) if self.path.exists() else 0

    @property
    def metrics(self) -> dict[str, float]:
        """What is logged, where steps may be passed over."""
        return {"train/skipped_steps": self.num_skipped} if self.skips else {}

    def note(self, spoiled: Tensor, step: int) -> int:
        """Take note of whether `step` was passed over: () float32 on the device, 1 if it was.

        Returns the step that ends the run, if one that is known of by now does; else 0.
        """
        if self.read_step is None:
            self.read_step = step
        if spoiled.device.type == "cpu":
            self.seen[step % RING] = spoiled.numpy()
        else:
            self.seen[step % RING] = PENDING
            self.slots[step % RING].copy_(spoiled, non_blocking=True)
        if self.buffers:
            self.keep_or_restore(spoiled)
        return self.verdict(step)

    @torch.no_grad()
    def keep_or_restore(self, spoiled: Tensor) -> None:
        """Remember BatchNorm's statistics, or put them back as they were before the step."""
        for buffer, kept in zip(self.buffers, self.kept, strict=True):
            buffer.copy_(torch.where(spoiled > 0, kept, buffer))
            kept.copy_(buffer)

    def verdict(self, step: int) -> int:
        """Look at the answers that have come from the device, and write spoiled steps down."""
        fatal = 0
        while self.read_step is not None and self.read_step <= step:
            answer = self.seen[self.read_step % RING]
            if answer == PENDING:
                break
            self.in_a_row = self.in_a_row + 1 if answer else 0
            if answer:
                self.num_skipped += 1
                self.write(self.read_step)
                if not fatal and (not self.skips or self.in_a_row >= MOST_IN_A_ROW):
                    fatal = self.read_step
            self.read_step += 1
        return fatal

    def write(self, step: int) -> None:
        """A row on a step in `nonfinite.jsonl`, from which its batch can be made again."""
        if not self.data.world.is_main:
            return
        indices = self.data.global_indices_at(step - 1).tolist()
        row = {
            "step": step,
            "learning_rate": self.lr_at(step - 1),
            "seed": self.data.seed,
            "indices": indices,
        }
        paths = self.data.source.paths
        if paths is not None:
            row["files"] = [str(paths[index]) for index in indices]
        with contextlib.suppress(OSError):  # a full disk, of which checkpoints tell
            append_lines(self.path, [json.dumps(row)])

    def error(self, step: int) -> FaultError:
        """What to raise for the step that ends the run."""
        return FaultError(
            f"the loss is not finite at step {step}, learning rate {self.lr_at(step - 1):.3g}: "
            f"stopped before the weights changed; the step's images are listed in {self.path}. "
            "The last save is sound. Lower --optim.lr, set --optim.clip-norm, or pass over such "
            "steps by --run.on-nonfinite skip"
        )
