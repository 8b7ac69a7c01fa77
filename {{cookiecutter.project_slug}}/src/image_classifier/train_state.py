"""All that a run must remember to go on exactly where it stopped."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .config import OptimConfig
from .data import Batch
from .precision import Precision


@dataclass
class TrainState:
    """What changes from step to step, and is therefore saved. Randomness is not: `seeding.py`."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    precision: Precision
    ema: nn.Module | None  # the average of past weights, if there is one
    ema_decay: float
    patience: int = 0  # evaluations without a better one, after which training ends; 0: never
    step: int = 0
    best_top1: float = -1.0  # of all evaluations so far
    best_step: int = -1  # when it was reached
    num_worse: int = 0  # evaluations since then

    @classmethod
    def start(
        cls,
        optim: OptimConfig,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        precision: Precision,
        patience: int = 0,
    ) -> "TrainState":
        """The state before the first step."""
        # A copy of what is compiled is not, and is to be evaluated as fast.
        ema = precision.place(deepcopy(model).requires_grad_(False)) if optim.ema_decay else None
        return cls(model, optimizer, precision, ema, optim.ema_decay, patience)

    @property
    def best_model(self) -> nn.Module:
        """The weights to evaluate and to keep: the averaged ones, if there are any."""
        return self.model if self.ema is None else self.ema

    @property
    def is_best(self) -> bool:
        """Whether these weights are the best that were evaluated so far."""
        return self.step == self.best_step

    def note(self, top1: float) -> None:
        """Remember the result of evaluating these weights, if it is the best."""
        self.num_worse += 1
        if top1 > self.best_top1:
            self.best_top1, self.best_step, self.num_worse = top1, self.step, 0

    @property
    def has_stalled(self) -> bool:
        """Whether so many evaluations in a row found nothing better that training ends."""
        return 0 < self.patience <= self.num_worse

    @property
    def is_to_keep(self) -> bool:
        """Whether these weights are the best so far, or the last."""
        return self.is_best or self.has_stalled

    def until_stalled(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches, which end early if training `has_stalled`."""
        while not self.has_stalled and (batch := next(batches, None)) is not None:
            yield batch

    @property
    def end(self) -> str:
        """A line on why the run ends, if that is because it `has_stalled`; else nothing."""
        if not self.has_stalled:
            return ""
        return (
            f"stopped early: no evaluation of {self.num_worse} was better than that of step "
            f"{self.best_step}, top-1 {self.best_top1:.2%}, whose weights are in best.pt"
        )

    @torch.no_grad()
    def advance(self) -> None:
        """Count the step, and move the averaged weights towards the model's."""
        self.step += 1
        if self.ema is None:
            return
        # The average of a few steps is not held back by the weights that a run starts with.
        decay = min(self.ema_decay, (1 + self.step) / (10 + self.step))
        old, new = tensors(self.ema), tensors(self.model)
        floats = [i for i, tensor in enumerate(new) if tensor.is_floating_point()]
        torch._foreach_lerp_([old[i] for i in floats], [new[i] for i in floats], 1 - decay)
        for i in set(range(len(new))) - set(floats):  # BatchNorm's count of batches
            old[i].copy_(new[i])

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values only, so that it can be read without running anybody's code."""
        return {
            "step": self.step,
            "best_top1": self.best_top1,
            "best_step": self.best_step,
            "num_worse": self.num_worse,
            "model": self.model.state_dict(),
            "ema": None if self.ema is None else self.ema.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.precision.state_dict(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Become what was saved; how the optimizer goes on with it is as it is set by now."""
        self.step = saved["step"]
        self.best_top1, self.best_step = saved["best_top1"], saved["best_step"]
        self.num_worse = saved.get("num_worse", 0)
        self.model.load_state_dict(dict(saved["model"]))
        if self.ema is not None:
            self.ema.load_state_dict(dict(saved["ema"]))
        groups = self.optimizer.state_dict()["param_groups"]
        state = saved["optimizer"]["state"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        self.precision.load_state_dict(saved["scaler"])


def tensors(model: nn.Module) -> list[Tensor]:
    """Weights and buffers."""
    return [*model.parameters(), *model.buffers()]
