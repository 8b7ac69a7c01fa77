"""The losses, of logits and targets of the same shape."""

from dataclasses import replace

from torch import Tensor
from torch.nn.functional import softplus

from ...config import Config
from ...data import TrainData
from ...tasks import Loss, mean_over_labels


def change_loss(loss: Loss, config: Config, _: TrainData, batch_size: int) -> Loss:
    """The loss of a run, with what `--optim.loss` names in place of binary cross entropy."""
    if config.optim.loss == "entropy":
        return loss
    cost = {"focal": focal, "asymmetric": asymmetric}[config.optim.loss]
    return replace(loss, of=mean_over_labels(cost, config.optim, batch_size))


def focal(logits: Tensor, targets: Tensor) -> Tensor:
    """Focal loss, with the constants of https://arxiv.org/abs/1708.02002."""
    from torchvision.ops import sigmoid_focal_loss

    return sigmoid_focal_loss(logits, targets)


def asymmetric(logits: Tensor, targets: Tensor) -> Tensor:
    """Asymmetric loss (https://arxiv.org/abs/2009.14119): gamma 0 and 4, margin 0.05."""
    of_no = (logits.sigmoid() - 0.05).clamp(min=0)
    return targets * softplus(-logits) - (1 - targets) * of_no**4 * (-of_no).log1p()
