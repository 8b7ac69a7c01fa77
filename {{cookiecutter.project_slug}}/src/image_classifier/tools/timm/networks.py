"""The models of timm by name, with that library installed: `timm/convnext_atto`."""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from ...config import ModelConfig
from ...errors import UserError, did_you_mean
from ...models import TIMM, adapted, size_misfit


def build(model: ModelConfig, num_classes: int, image_size: int) -> nn.Module:
    """Timm's model of the name after `timm/`, with a head for `num_classes`.

    Raises:
        UserError: if timm is missing or has no such model, or it can't take such images.
    """
    library, name = open_timm(), model.name.removeprefix(TIMM)
    if not library.is_model(name):
        names = [TIMM + other for other in library.list_models()]
        raise UserError(f"timm has no model {name!a}{did_you_mean(model.name, names, most=3)}")
    options: dict[str, object] = {"num_classes": num_classes}
    if getattr(pretrained_config(model.name), "fixed_input_size", False):
        options["img_size"] = image_size
    try:
        network = library.create_model(name, pretrained=False, **options)
    except (ValueError, AssertionError, TypeError) as error:  # patches that don't fit the image
        raise UserError(size_misfit(model, image_size, error)) from error
    network.register_load_state_dict_pre_hook(fit_weights)
    return adapted(network, model, image_size)


def fit_weights(network: nn.Module, weights: dict[str, Tensor], *_: object) -> None:
    """Make `weights` fit the network as timm does: its names, and positions of its image size.

    Position embeddings are interpolated, as of DINOv2 from 518 pixels to --data.image-size.
    """
    family = sys.modules[type(network).__module__]
    if fit := getattr(family, "checkpoint_filter_fn", None):
        fitting = fit(dict(weights), network)
        weights.clear()
        weights.update(fitting)


def pretrained_config(name: str) -> Any:  # noqa: ANN401 - timm's own
    """What timm knows of the weights that it publishes for the model `name`, or None."""
    return open_timm().get_pretrained_cfg(name.removeprefix(TIMM), allow_unregistered=True)


def open_timm() -> ModuleType:
    """The library."""
    try:
        return import_module("timm")
    except ImportError as error:
        raise UserError(f"models of timm need it: pip install timm ({error})") from error
