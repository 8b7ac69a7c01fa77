"""The network of a run as it begins: with the random weights of the seed, on the device."""

from torch import nn

from .augment import Normalize
from .config import Config
from .data import TrainData
from .models import build_model
from .models.strips import learn_from_strips
from .precision import Precision
from .runtime.seeding import WEIGHTS, seeded


def begin_network(
    config: Config, data: TrainData, normalize: Normalize, precision: Precision
) -> nn.Module:
    """The network that `config` names, to learn from `data`; the same on every rank.

    Raises:
        UserError: if there is no such model, or a knob it can't follow.
    """
    with seeded(WEIGHTS, config.seed):
        model = build_model(
            config.model,
            data.num_classes,
            config.data.image_size,
            sample=lambda count: normalize(data.sample(count)),
        )
    model = precision.place(model)
    if precision.uses_amx and not config.compute.compile:
        learn_from_strips(model)
    return model
