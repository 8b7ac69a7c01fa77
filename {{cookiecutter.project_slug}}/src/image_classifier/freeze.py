"""A frozen start: only the last layer learns at first, on top of trained weights, and then all do.

What a new last layer sends back through the network in its first steps is noise, and would spoil
features that are better than what it learns from: https://arxiv.org/abs/2202.10054.
"""

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from .config import Config
from .models import find_head
from .optim import begin_momentum
from .runtime.distributed import World


class Freeze:
    """Which weights of a model learn at a step, and what shares their gradients among ranks."""

    def __init__(
        self, config: Config, model: nn.Module, steps_per_epoch: int, world: World
    ) -> None:
        """Freeze all layers but the last, if the run begins so.

        This comes before the optimizer is made, which then has nothing to remember of them.
        """
        self.model, self.world, self.compute = model, world, config.compute
        self.thaw_step = round(config.optim.frozen_epochs * steps_per_epoch)
        self.learner: nn.Module | None = None
        self.is_frozen = self.thaw_step > 0
        self.weights: list[nn.Parameter] = []  # that learn later
        if self.is_frozen:
            head = {id(weight) for weight in find_head(model)[1].parameters()}
            learning = (weight for weight in model.parameters() if weight.requires_grad)
            self.weights = [weight for weight in learning if id(weight) not in head]
        for weight in self.weights:
            weight.requires_grad_(False)
        self.norms: list[nn.Module] = []  # whose statistics stay as they are

    def learner_at(self, step: int, optimizer: torch.optim.Optimizer) -> nn.Module:
        """The model as it learns in `step`; ranks average the gradients of what does."""
        is_frozen = step < self.thaw_step
        if self.learner is None or is_frozen != self.is_frozen:
            self.is_frozen = is_frozen
            for weight in self.weights:
                weight.requires_grad_(not is_frozen)
            begin_momentum(optimizer)
            # Anew, as DDP waits for the gradients of all that learned when it was made.
            self.learner = self.world.parallelize(self.model.train(), self.compute)
            norms = [layer for layer in self.model.modules() if isinstance(layer, _BatchNorm)]
            self.norms = norms if is_frozen else []
        if self.norms and self.norms[0].training:  # at first, and after each evaluation
            for norm in self.norms:
                norm.eval()
        return self.learner
