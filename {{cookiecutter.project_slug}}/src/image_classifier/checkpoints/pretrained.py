"""Pretrained weights: from a run of this project, or from a file of torchvision's or timm's."""

import re
import sys
from argparse import Namespace
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from ..config import Config
from ..errors import UserError
from ..extensions import functions
from ..models import HAS_AUX, find_head, find_heads, find_library, load_weights, published_weights
from ..runtime.console import printable, some
from ..runtime.distributed import World
from ..runtime.files import about_tensors, open_tensors
from ..runtime.run_dir import best_checkpoint
from .reading import Colors, check_images, check_weights, first_reason, parse_checkpoint, read_file

PUBLISHED = "pretrained"  # in place of a file: what the library of the model publishes
# Where the training scripts of timm and torchvision keep weights in a checkpoint; averages first.
ENTRIES = ("state_dict_ema", "model_ema", "state_dict", "model")
WRAPPERS = ("module.", "_orig_mod.")  # prefixes of DDP and of averaged weights; of torch.compile
OLD_DENSENET = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12])\.")  # torchvision's files


@dataclass(frozen=True)
class PretrainedWeights:
    """The weights that a run starts with, and how the images were normalized for them."""

    note: str  # where they come from, for the log
    weights: dict[str, Tensor] = field(default_factory=dict)  # none: the model keeps its own
    classes: tuple[str, ...] = ()  # of their last layer; none: unknown
    mean_std: tuple[Colors, Colors] | None = None  # None: unknown, that of the images counts

    def knows(self, model: nn.Module, classes: tuple[str, ...]) -> bool:
        """Whether these weights have those of the last layer of `model`, for `classes`."""
        head, layer = find_head(model)
        sizes = {f"{head}.{name}": weight.shape for name, weight in layer.named_parameters()}
        theirs = {name: self.weights[name].shape for name in sizes if name in self.weights}
        return theirs == sizes and self.classes in ((), classes)

    def load_into(self, model: nn.Module, classes: tuple[str, ...]) -> str:
        """Load the weights into `model`, which predicts `classes`; return a note for the log.

        The last layer keeps its own weights if these were trained on other classes. The first
        is adapted if these are for other channels.

        Raises:
            UserError: if the weights are another model's.
        """
        if not self.weights:
            return self.note
        head, _ = find_head(model)
        is_new = not self.knows(model, classes)
        own = {weight for layer in find_heads(model) for weight in layer.parameters()}
        kept = {name for name, weight in model.named_parameters() if is_new and weight in own}
        weights = {name: weight for name, weight in self.weights.items() if name not in kept}
        stems = adapt_channels(weights, model)
        try:
            missing, unexpected = load_weights(model, weights, strict=False)
            # Not the batches that BatchNorm counted: torch adds those that older files lack.
            if alone := tuple(sorted({*missing, *unexpected} - kept)):
                raise RuntimeError(f"only one of the two has {some(alone)}")
        except RuntimeError as error:
            raise UserError(
                f"{self.note} do not fit the model: {first_reason(error)}; take the --model.name "
                "and --data.image-size that they are for"
            ) from error
        new = f"; {head} is new" if is_new else ""
        new += f"; adapted from 3 channels: {', '.join(stems)}" if stems else ""
        return f"{self.note}{new}{'; images are normalized as for them' if self.mean_std else ''}"


def adapt_channels(weights: dict[str, Tensor], model: nn.Module) -> tuple[str, ...]:
    """Adapt filters for 3 channels to the channels that `model` has in their place, by name.

    As timm does, whose `adapt_input_conv` this is: the sum over colors for one channel, so that
    gray images give what they gave as colors; else repeated, and scaled so that sums stay.
    """
    names = []
    for name, own in model.state_dict().items():
        outputs, channels, *side = own.shape if own.ndim == 4 else (0, 3)
        plain = name.replace(".parametrizations.", ".").removesuffix(".original")  # with adapters
        theirs = weights.get(plain)
        if theirs is None or channels == 3 or theirs.shape != (outputs, 3, *side):
            continue
        if channels == 1:
            weights[plain] = theirs.float().sum(dim=1, keepdim=True)
        else:
            repeated = theirs.float().repeat(1, -(-channels // 3), 1, 1)
            weights[plain] = repeated[:, :channels] * (3 / channels)
        names.append(plain)
    return tuple(names)


def load_pretrained(
    config: Config, world: World, saved: dict[str, Any] | None = None
) -> PretrainedWeights:
    """The weights that `--run.init-from` names, in host memory; none if it is empty.

    Of the checkpoint `saved`, from which the run resumes, only the normalization counts; nothing of
    one from before the first step, which is made again. A normalization of other channels is left
    out, as is a library's, of 8 bits, where images have 16.

    Raises:
        UserError: if there is no such file, or it holds anything but weights.
    """
    name = config.model.name
    init_from = config.run.init_from
    if not init_from:
        return PretrainedWeights("random weights")
    if saved is not None and saved["state"]["step"]:
        note = "weights of this run; --run.init-from was for its start"
        return PretrainedWeights(note, mean_std=(tuple(saved["mean"]), tuple(saved["std"])))
    if init_from == PUBLISHED:
        found = published(name, world)
    else:
        found = read_weights(best_checkpoint(init_from))
    found = replace(found, weights=unwrapped(found.weights))
    mean_std = found.mean_std or (usual_normalization(name) if config.data.bits == 8 else None)
    is_for_them = mean_std is not None and len(mean_std[0]) == config.data.channels
    return replace(found, mean_std=mean_std if is_for_them else None)


def read_weights(path: Path) -> PretrainedWeights:
    """The weights in a file of torch's or of safetensors, by the names that it has for them."""
    note = f"weights from {str(path)!a}"
    known = {}
    if not path.is_file():
        raise UserError(f"there is no checkpoint {str(path)!a}")
    if path.suffix == ".safetensors":
        try:
            with open_tensors(path) as file:
                # Ours also says which images they were trained on.
                about = about_tensors(file.metadata(), "classes", "mean", "std")
                weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if "classes" in about:
                known["mean_std"] = check_images(about["classes"], about["mean"], about["std"])
                known["classes"] = tuple(about["classes"])
        except Exception as error:
            raise UserError(f"--run.init-from {str(path)!a}: {error}") from error
        return PretrainedWeights(note, weights, **known)
    # The training scripts of timm and torchvision save their arguments as a `Namespace`.
    with torch.serialization.safe_globals([Namespace]):
        saved, digest = read_file(path, needs_archive=False)
    saved = saved if isinstance(saved, dict) else {}
    if saved.keys() >= {"state", "config", "classes"}:
        best = parse_checkpoint(saved, path, digest)
        return PretrainedWeights(note, best.weights, best.classes, (best.mean, best.std))
    entries = next((saved[name] for name in ENTRIES if isinstance(saved.get(name), dict)), saved)
    weights = {str(name): w.detach() for name, w in entries.items() if isinstance(w, Tensor)}
    try:
        check_weights(weights)
    except ValueError as error:
        raise UserError(f"{str(path)!a} is no state dict or checkpoint: {error}") from error
    return PretrainedWeights(note, weights)


def unwrapped(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """`weights` by the names that our models have, without those of wrappers."""
    weights = {name: w for name, w in weights.items() if name != "n_averaged"}
    for wrapper in WRAPPERS:
        consume_prefix_in_state_dict_if_present(weights, wrapper)
    return {OLD_DENSENET.sub(r"\1\2.", name): weight for name, weight in weights.items()}


def usual_normalization(name: str) -> tuple[Colors, Colors] | None:
    """Mean and std that the published weights of the model `name` expect; None if unknown."""
    if name in HAS_AUX:  # torchvision's own change images to that, by `transform_input`
        return (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
    if networks := find_library(name):
        images = networks.pretrained_config(name)
    else:
        published = published_weights(name)
        images = published and published.transforms()
    known = images is not None and images.mean
    return (tuple(images.mean), tuple(images.std)) if known else None


def published(name: str, world: World) -> PretrainedWeights:
    """The weights that the library of the model `name` publishes, downloaded once per machine.

    Raises:
        UserError: if there are none, or they can't be downloaded.
    """
    if networks := find_library(name):
        with world.local_main_first(f"reading the weights of {name}"):
            note = f"{name.partition('/')[0]}'s weights of {name}"
            return PretrainedWeights(note, networks.published(name))
    return replace(read_weights(download(name, world)), note=f"torchvision's weights of {name}")


def download(name: str, world: World) -> Path:
    """The file of torchvision's weights of the model `name`, downloaded once per machine.

    Its name has the checksum that is verified.
    """
    weights = published_weights(name)
    if weights is None:
        raise UserError(
            f"--run.init-from {PUBLISHED}: torchvision has no weights of {name}; give the file of "
            "some, take one of its models, such as resnet50, or train from scratch: preset folder"
        )
    url = weights.url
    path = Path(torch.hub.get_dir(), "checkpoints", Path(url).name)
    checksum = path.stem.rpartition("-")[2]
    with world.local_main_first(f"reading the weights of {name}"):
        if path.is_file():
            return path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(url, str(path), checksum, progress=sys.stderr.isatty())
        except Exception as error:
            raise no_network(name, url, error) from error
    return path


def no_network(name: str, address: str, error: Exception) -> UserError:
    """The error to raise if the weights of the model `name` can't be downloaded from `address`."""
    reason = printable(str(error) or type(error).__name__).partition(". ")[0]
    others = "".join(f"; or {way()}" for way in functions("networks", "without_network"))
    return UserError(
        f"the weights of {name} can't be downloaded ({reason}): copy {address} here and give "
        f"--run.init-from FILE{others}; or train the preset folder, from scratch"
    )
