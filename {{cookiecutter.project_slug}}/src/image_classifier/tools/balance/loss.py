"""Binary cross entropy in which the positives of a rare label count for more."""

from dataclasses import replace
from functools import cache

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from ...config import Config
from ...data import TrainData
from ...tasks import Loss, mean_over_labels

MOST_WEIGHT = 100.0  # of a rare label


def change_loss(loss: Loss, config: Config, data: TrainData, batch_size: int) -> Loss:
    """The loss of a run; of several labels with `data.balance` loss, a weighted one."""
    source = data.source
    if config.data.balance != "loss" or not source.is_multi_label:
        return loss
    positives = source.class_counts()
    negatives = (source.labels == 0).sum(0)
    weight = (negatives / positives.clamp(min=1)).clamp(1 / MOST_WEIGHT, MOST_WEIGHT)
    on = cache(weight.to)

    def cost(logits: Tensor, targets: Tensor) -> Tensor:
        given = {"reduction": "none", "pos_weight": on(logits.device)}
        return binary_cross_entropy_with_logits(logits, targets, **given)

    return replace(loss, of=mean_over_labels(cost, config.optim, batch_size))
