"""The weights that a run starts with: from a file of this project, of torchvision or of timm.

Images are then normalised as those were that the weights learned from.
"""

import json
import re
import sys
from argparse import Namespace
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..config import ModelConfig, RunConfig, UserError
from ..data import EvalData, Source, TrainData
from ..runtime.distributed import World
from . import published_normalisation
from .blocks import find_head
from .weights import (
    PARTS,
    WEIGHTS,
    DamagedError,
    abbreviate,
    best_in,
    check_archive,
    is_checkpoint,
    load_plain,
    open_saved,
    read_checkpoint,
)

PUBLISHED = "pretrained"  # in place of a file: torchvision's own
# Where training programs keep weights in what they save; averaged ones first.
NESTS = ("model_ema", "state_dict_ema", "state_dict", "model")
WRAPPERS = ("module.", "_orig_mod.")  # of DDP, of averaged weights, and of torch.compile
# Of googlenet and inception_v3: outputs beside the last, which only a training from scratch needs.
AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")
OLD_DENSENET = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12])\.")
UNKEPT = ".num_batches_tracked"  # which BatchNorm has only since torch 0.4.1
LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # what files of torch before 1.6 begin with

Colours = tuple[float, float, float]  # of red, green and blue


@dataclass(frozen=True)
class Origin:
    """What a run starts with."""

    path: str  # of the file; empty: there is none
    words: str  # on it
    weights: dict[str, Tensor] = field(default_factory=dict)  # none: they stay as they are
    classes: tuple[str, ...] = ()  # that they tell apart, if that is known
    mean: Colours | None = None  # by which their images were normalised; None: it is not known
    std: Colours | None = None

    def adopt(self, source: Source) -> Source:
        """The same images, to be normalised as those that the weights learned from."""
        if self.mean is None or self.std is None:
            return source
        return replace(source, mean=self.mean, std=self.std)

    def fill(self, model: nn.Module, classes: tuple[str, ...]) -> str:
        """Give `model` the weights, and return a line on them.

        The last layer stays random if it is for other classes.

        Raises:
            UserError: if they are of another model.
        """
        if not self.weights:
            return self.words
        own = model.state_dict()
        head, _ = find_head(model)
        weights = with_head_named(head, self.weights, own)
        shapes, own_shapes = ({name: w.shape for name, w in d.items()} for d in (weights, own))
        of_head = {f"{head}.weight", f"{head}.bias"}
        if reason := shapes_misfit(shapes, own_shapes, of_head):
            raise UserError(
                f"--run.init-from {self.path!a} has the weights of another model: {reason}"
            )
        is_new = self.classes not in ((), classes) or any(
            shapes.get(name) != own_shapes.get(name) for name in of_head
        )
        kept = {name: w for name, w in weights.items() if not (is_new and name in of_head)}
        model.load_state_dict(kept, strict=False)
        self.weights.clear()  # the model has its own copy
        new = f"; {head} is new, for other classes" if is_new else ""
        seen = "; images are normalised as for them" if self.mean else ""
        return self.words + new + seen


def open_origin(
    run: RunConfig, model: ModelConfig, world: World, *data: TrainData | EvalData
) -> Origin:
    """The weights that `run` asks for; none if it asks for none, or goes on from its own.

    The images of `data` are from here on normalised as for them.

    Raises:
        UserError: if there is no such file, or it holds anything but weights.
    """
    origin = find_origin(run, model, world)
    for images in data:
        images.source = origin.adopt(images.source)
    return origin


def find_origin(run: RunConfig, model: ModelConfig, world: World) -> Origin:
    """The weights, and what is known of them.

    Raises:
        UserError: as `open_origin`.
    """
    if not run.init_from:
        return Origin("", "random weights")
    own = Path(run.dir, "checkpoints")
    if (own / "last.pt").exists() and not run.fresh:
        mean, std = saved_normalisation(own)
        words = "weights of this run; --run.init-from was for its start"
        return Origin("", words, mean=mean, std=std)
    is_published = run.init_from == PUBLISHED
    path = download(model.name, world) if is_published else Path(run.init_from)
    if not path.is_file():
        raise UserError(f"there is no checkpoint {str(path)!a}")
    origin = read_safetensors(path) if path.suffix == ".safetensors" else read_torch(path)
    if origin.mean is None and not origin.classes:
        mean, std = published_normalisation(model.name)
        origin = replace(origin, mean=mean, std=std)
    return replace(origin, words=f"weights from {str(path)!a}")


def read_safetensors(path: Path) -> Origin:
    """The weights of a `.safetensors` file; one of ours knows its classes and normalisation.

    Raises:
        UserError: if it is damaged.
    """
    try:
        with safe_open(path, "pt") as file:  # once, as another file may get its name
            about = file.metadata() or {}
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"--run.init-from {str(path)!a}: {error}") from error
    known = {}
    for name in ("classes", "mean", "std"):
        try:
            known[name] = tuple(json.loads(about[name]))
        except (KeyError, ValueError, TypeError, RecursionError):  # not of ours
            continue
        if reason := PARTS[name](known[name]):
            raise UserError(f"--run.init-from {str(path)!a}: {name}{reason}")
    return Origin(str(path), "", bare(weights), **known)


def read_torch(path: Path) -> Origin:
    """The weights of a checkpoint, or of a state dict that was saved by torch.

    Raises:
        UserError: if it is damaged, or holds anything but tensors and plain values.
    """
    is_legacy = False
    try:
        # What programs were started with, which many save beside their weights, is plain values.
        with open_saved(path) as file, torch.serialization.safe_globals([Namespace]):
            is_legacy = file.read(len(LEGACY)) == LEGACY
            if not is_legacy:
                check_archive(file, path)
            saved = load_plain(file, path)
    except DamagedError as error:
        raise UserError(str(error)) from error
    except UserError as error:
        if not is_legacy or not isinstance(error.__cause__, RuntimeError | EOFError):
            raise
        raise UserError(f"{str(path)!a} is damaged: {error.__cause__}") from error
    if is_checkpoint(saved):
        best = best_in(saved, path)
        images = best.images
        return Origin(str(path), "", best.weights, images.classes, images.mean, images.std)
    return Origin(str(path), "", state_dict_in(saved, path))


def state_dict_in(saved: Any, path: Path) -> dict[str, Tensor]:  # noqa: ANN401 - whatever a file holds
    """The weights in what a training program saved, by the names that the bare model has.

    Raises:
        UserError: if there are none.
    """
    if isinstance(saved, dict):
        saved = next((saved[name] for name in NESTS if isinstance(saved.get(name), dict)), saved)
    weights = saved if isinstance(saved, dict) else {}
    weights = {
        name: weight.detach()
        for name, weight in weights.items()
        if isinstance(name, str) and isinstance(weight, Tensor)
    }
    if reason := WEIGHTS(weights):
        raise UserError(f"{str(path)!a} holds weights that no model takes: {reason[1:]}")
    if not weights:
        raise UserError(f"{str(path)!a} holds no weights: neither a state dict nor a checkpoint")
    return bare(weights)


def bare(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights without what wrappers put before their names, and outputs that nobody asks."""
    weights = {name: w for name, w in weights.items() if name != "n_averaged"}
    while wrapper := next((w for w in WRAPPERS if all(name.startswith(w) for name in weights)), ""):
        weights = {name.removeprefix(wrapper): w for name, w in weights.items()}
    weights = {name: w for name, w in weights.items() if not name.startswith(AUXILIARY)}
    return {OLD_DENSENET.sub(r"\1\2.", name): w for name, w in weights.items()}


def with_head_named(
    head: str, weights: dict[str, Tensor], own: dict[str, Tensor]
) -> dict[str, Tensor]:
    """`weights` whose last layer is called `head`, with dropout before it or without."""
    for other in (head.removesuffix(".1"), f"{head}.1"):
        if f"{head}.weight" not in weights and f"{other}.weight" in weights.keys() - own.keys():
            names = {f"{other}.{kind}": f"{head}.{kind}" for kind in ("weight", "bias")}
            return {names.get(name, name): weight for name, weight in weights.items()}
    return weights


def shapes_misfit(
    theirs: dict[str, torch.Size], own: dict[str, torch.Size], of_head: set[str]
) -> str:
    """Why weights of these shapes don't fit a model, and what to do; nothing if all do.

    What is `of_head` may be of any shape.
    """
    missing = sorted(name for name in (theirs.keys() ^ own.keys()) - of_head)
    missing = [name for name in missing if not name.endswith(UNKEPT)]
    if missing:
        return f"only one of the two has {abbreviate(missing)}"
    for name, own_shape in own.items():  # in the order of the layers
        shape = theirs.get(name, own_shape)
        if name in of_head or shape == own_shape:
            continue
        reason = f"{name} has shape {tuple(shape)}, not {tuple(own_shape)}"
        if len(shape) == len(own_shape) == 4 and shape[:2] == own_shape[:2]:
            stem = "imagenet" if shape > own_shape else "small"
            return f"{reason}; --model.stem {stem} has the first layer that they are for"
        if "pos" in name:
            return f"{reason}; take the --data.image-size that they are for"
        return reason
    return ""


def saved_normalisation(folder: Path) -> tuple[Colours, Colours] | tuple[None, None]:
    """Mean and deviation by which the run with these checkpoints normalises."""
    for path in (folder / "last.pt", *sorted(folder.glob("step_*.pt"), reverse=True)):
        try:
            saved = read_checkpoint(path)
        except DamagedError:  # `Checkpoints.resume` says so
            continue
        return tuple(saved["mean"]), tuple(saved["std"])
    return None, None


def download(name: str, world: World) -> Path:
    """The file of torchvision's weights of the model `name`, once for all processes here.

    Raises:
        UserError: if there are none, or no network.
    """
    from torchvision import models

    if name not in models.list_models(module=models):
        raise UserError(
            f"--run.init-from {PUBLISHED}: torchvision has no weights of {name}; "
            "give the file of some, or take one of its models, such as resnet50"
        )
    url = models.get_model_weights(name).DEFAULT.url
    path = Path(torch.hub.get_dir(), "checkpoints", Path(urlparse(url).path).name)
    checksum = torch.hub.HASH_REGEX.search(path.name)
    with world.first_here():
        if path.is_file():
            return path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(
                url, str(path), checksum and checksum[1], progress=sys.stderr.isatty()
            )
        except (OSError, RuntimeError, HTTPException) as error:
            raise UserError(
                f"the weights of {name} can't be downloaded ({error}): fetch {url} where there is "
                f"a network, and start with --run.init-from {path.name}"
            ) from error
    return path
