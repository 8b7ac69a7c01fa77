"""What changes from step to step, and is saved. Randomness is not: see `runtime/seeding.py`."""

from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain
from math import isnan
from typing import Any

import torch
from torch import Tensor, nn

from ..metrics import NO_DECISION, Decision, better, find_metric, metric_text, read_decision
from ..models import load_weights
from ..precision import Precision
from ..runtime.distributed import local_part
from .reading import check_weights

NUMBERS = ("step", "best_score", "best_step", "num_worse", "seconds")  # of a state, as it is saved


@dataclass
class TrainState:
    """All that a run needs to continue exactly where it stopped."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    precision: Precision
    ema: nn.Module | None = None  # exponential moving average of the weights, if there is one
    ema_decay: float = 0.0
    best_by: str = "top1"  # the metric that decides
    step: int = 0  # steps done
    best_score: float = 0.0  # the best value of that metric so far, if there is one
    best_step: int = -1  # of the weights to keep, if there are any: see `record`
    num_worse: int = 0  # evaluations since that value
    decision: Decision = NO_DECISION  # of the last evaluation, on rank 0
    seconds: float = 0.0  # that a run took, all its starts together, where that decides its end

    @property
    def best_model(self) -> nn.Module:
        """The model to evaluate and to keep: the averaged one, if there is one."""
        return self.model if self.ema is None else self.ema

    @property
    def is_best(self) -> bool:
        """Whether these weights are the best so far."""
        return self.step == self.best_step

    def record(self, score: float, slack: float = 0.0) -> None:
        """Take note of the score of these weights, which may be the best so far.

        The best are the latest that are at most `slack` behind the best score, which may be luck:
        as the learning rate falls, later weights are better on other images.
        """
        self.num_worse += 1
        sign = better(self.best_by)
        best = self.best_score
        if self.best_step < 0 or isnan(best) or sign * score > sign * best:
            self.best_score = score
            self.num_worse = 0
        if self.num_worse == 0 or sign * (best - score) <= slack:
            self.best_step = self.step

    def early_stop(self, patience: int) -> str:
        """Why to stop early, once `patience` evaluations in a row were not better; else nothing."""
        if not 0 < patience <= self.num_worse:
            return ""
        return f"stopped early: no evaluation of {self.num_worse} was better; {self.best_text}"

    @property
    def best_text(self) -> str:
        """Which weights are in best.pt."""
        score = metric_text(self.best_by, self.best_score)
        when = f"of step {self.best_step}" if self.best_step else "from before training"
        near = "within an image of" if find_metric(self.best_by).is_percent else "with"
        return f"best.pt has the weights {when}, the latest {near} the best score, {score}"

    def advance(self) -> None:
        """Count a step, and average the weights."""
        self.step += 1
        if self.ema is not None:
            self.average()

    @torch.no_grad()
    def average(self) -> None:
        """Move the averaged weights towards the model's."""
        # The first averages are over few steps, so that random initial weights do not stay in them.
        decay = min(self.ema_decay, (1 + self.step) / (10 + self.step))
        pairs = [tuple(map(local_part, pair)) for pair in self.pairs]
        floats = [pair for pair in pairs if pair[1].is_floating_point()]
        counts = [pair for pair in pairs if not pair[1].is_floating_point()]  # BatchNorm's batches
        torch._foreach_lerp_(*zip(*floats, strict=True), 1 - decay)
        if counts:
            torch._foreach_copy_(*zip(*counts, strict=True))

    @cached_property
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Averaged tensors, and the model's, changed in place; to find ResNet-50's takes 0.5 ms."""
        nets = self.ema, self.model
        return [*zip(*(chain(net.parameters(), net.buffers()) for net in nets), strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values only, so that it loads with `weights_only=True`."""
        return {
            **{name: getattr(self, name) for name in NUMBERS},
            "decision": asdict(self.decision),
            "model": dict(self.model.state_dict()),
            "ema": None if self.ema is None else dict(self.ema.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.precision.scaler.state_dict(),  # empty but for fp16
        }

    def load_numbers(self, saved: dict[str, Any]) -> None:
        """Restore what is no tensor; `seconds` and `decision` are younger than the others."""
        for name in saved.keys() & NUMBERS:
            setattr(self, name, saved[name])
        self.decision = read_decision(saved)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore what was saved.

        Raises:
            LookupError, TypeError, ValueError, AttributeError, RuntimeError: if it is of another
                model or optimizer.
        """
        self.load_numbers(saved)
        load_weights(self.model, saved["model"])
        if self.ema is not None:
            load_weights(self.ema, saved["ema"])
        load_optimizer(self.optimizer, saved["optimizer"])
        self.precision.scaler.load_state_dict(saved["scaler"])


def load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Restore the state of each weight; hyper-parameters stay those of the config.

    torch takes state of any size and memory layout. The fused kernels of SGD and AdamW would write
    past its end, and pair wrong numbers: `--compute.channels-last` may have changed.

    Raises:
        LookupError, TypeError, ValueError, AttributeError: if it is of other weights.
    """
    groups = optimizer.state_dict()["param_groups"]
    if [group["params"] for group in saved["param_groups"]] != [g["params"] for g in groups]:
        raise ValueError("its optimizer has other groups of weights")
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    is_fused = isinstance(optimizer, torch.optim.SGD | torch.optim.AdamW)
    for number, state in saved["state"].items() if is_fused else ():
        check_weights(state)
        for name, value in state.items():
            weight = weights[number]
            if value.numel() != (1 if name == "step" else weight.numel()):
                raise ValueError(f"its optimizer has another shape of weight {number}")
            if value.shape == weight.shape:
                same_layout = torch.empty_like(weight, dtype=value.dtype, device=value.device)
                state[name] = same_layout.copy_(value)
    optimizer.load_state_dict({"state": saved["state"], "param_groups": groups})
