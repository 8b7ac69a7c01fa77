"""Several networks as one, whose probabilities are the mean of theirs.

https://arxiv.org/abs/1612.01474: networks that differ only in what chance decided make different
mistakes, so their mean makes fewer, and is better calibrated.
"""

import math
from collections.abc import Iterator
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from ...config import Config, ModelConfig
from ...errors import UserError


def wrap_network(network: nn.Module, model: ModelConfig, channels: int) -> nn.Module:
    """`network`, or with `model.members` above 1 an `Ensemble` of as many of its kind."""
    if model.members == 1:
        return network
    return Ensemble(network, model.members, channels, model.task == "multi-label")


def change_training(_model: nn.Module, config: Config, *_: object) -> None:
    """Refuse to train an ensemble.

    Raises:
        UserError: with `--model.members` above 1.
    """
    if config.model.members > 1:
        raise UserError(
            f"--model.members {config.model.members}: an ensemble is not trained, its runs are: "
            "train them one by one, or by `repeat`, and then `ensemble RUN RUN`"
        )


class Ensemble(nn.Module):
    """Networks of one kind, each with images normalized as it knows them and its temperature.

    The buffers that make up for the differences are saved with the weights: `scale` and `shift`,
    (members, channels), turn normalized images into those of each member; `temperature`,
    (members,), divides its logits.
    """

    def __init__(self, network: nn.Module, count: int, channels: int, has_several: bool) -> None:
        """`count` networks like `network`; `has_several` if an image may have several labels."""
        super().__init__()
        self.members = nn.ModuleList([network, *(deepcopy(network) for _ in range(count - 1))])
        for member in self.members:
            # A library's hooks, for weights that are not ours, know no names that begin otherwise.
            member._load_state_dict_pre_hooks.clear()
        self.has_several = has_several
        self.register_buffer("scale", torch.ones(count, channels))
        self.register_buffer("shift", torch.zeros(count, channels))
        self.register_buffer("temperature", torch.ones(count))

    def each_network(self, images: Tensor) -> Iterator[tuple[nn.Module, Tensor]]:
        """The members, each with the normalized images (batch, channels, side, side) as it is fed.

        For tools that look into a network.
        """
        for member, scale, shift in zip(self.members, self.scale, self.shift, strict=True):
            yield member, images * scale[:, None, None] + shift[:, None, None]

    def forward(self, images: Tensor) -> Tensor:
        """Logits (batch, classes) float32 whose probabilities are the mean of the members'."""
        each = [member(own).float() for member, own in self.each_network(images)]
        logits = torch.stack(each) / self.temperature[:, None, None]  # (members, batch, classes)
        if self.has_several:
            # In logarithms, as 1 - p would be 0 where p is nearly 1.
            return logsigmoid(logits).logsumexp(0) - logsigmoid(-logits).logsumexp(0)
        return logits.log_softmax(2).logsumexp(0) - math.log(len(each))
