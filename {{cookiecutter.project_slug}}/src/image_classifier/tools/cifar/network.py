"""The first layer of airbench's networks is computed from training images."""

from torch import nn

from ...config import Config
from ...data import TrainData
from ...preprocess import Normalize
from .models import Airbench

IMAGES_TO_FIT = 2000


def change_training(model: nn.Module, _: Config, data: TrainData, normalize: Normalize) -> None:
    """Fit the first layer of a network of this tool."""
    if isinstance(model, Airbench):
        model.fit(normalize(data.sample(IMAGES_TO_FIT)))
