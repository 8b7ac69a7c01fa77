"""Pretrained weights: from a run of this project, or from a file of torchvision's or timm's."""

import json
import re
import sys
from argparse import Namespace
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from ..config import ModelConfig, RunConfig
from ..errors import UserError
from ..runtime.console import some
from ..runtime.distributed import World
from .blocks import find_head
from .timm import PREFIX, pretrained_config
from .torchvision import AUXILIARY, published_weights
from .weights import (
    CHECKPOINT,
    IMAGES,
    WEIGHTS,
    Colours,
    DamagedError,
    FormError,
    check_form,
    load_best,
    read_checkpoint,
    read_saved,
    shapes,
)

PUBLISHED = "pretrained"  # in place of a file: torchvision's own weights
# Where the training scripts of timm and torchvision keep weights in a checkpoint; averages first.
ENTRIES = ("state_dict_ema", "model_ema", "state_dict", "model")
WRAPPERS = ("module.", "_orig_mod.")  # prefixes of DDP and of averaged weights; of torch.compile
# googlenet and inception_v3 have auxiliary outputs in training, which our models leave out.
AUXILIARY_HEADS = ("aux1.", "aux2.", "AuxLogits.")
OLD_DENSENET = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12])\.")  # torchvision's files
OPTIONAL = ".num_batches_tracked"  # of BatchNorm; torchvision's older files lack it


@dataclass(frozen=True)
class PretrainedWeights:
    """The weights that a run starts with, and how the images were normalised for them."""

    note: str  # where they come from, for the log
    weights: dict[str, Tensor] = field(default_factory=dict)  # none: the model keeps its own
    classes: tuple[str, ...] = ()  # of their last layer; none: unknown
    mean: Colours | None = None  # None: unknown, so images are normalised by their own
    std: Colours | None = None

    def load_into(self, model: nn.Module, classes: tuple[str, ...]) -> str:
        """Load the weights into `model`, which predicts `classes`; return a note for the log.

        The last layer keeps its random weights if these were trained on other classes.

        Raises:
            UserError: if the weights are another model's.
        """
        if not self.weights:
            return self.note
        head, _ = find_head(model)
        in_head = {f"{head}.weight", f"{head}.bias"}
        theirs, own = shapes(self.weights), shapes(model.state_dict())
        if reason := shapes_misfit(theirs, own, in_head):
            raise UserError(f"{self.note} do not fit the model: {reason}")
        is_new = self.classes not in ((), classes)
        is_new |= any(theirs.get(name) != own.get(name) for name in in_head)
        kept = self.weights.keys() - (in_head if is_new else set())
        model.load_state_dict({name: self.weights[name] for name in kept}, strict=False)
        new = f"; {head} is new, for other classes" if is_new else ""
        return f"{self.note}{new}{'; images are normalised as for them' if self.mean else ''}"


def load_pretrained(run: RunConfig, model: ModelConfig, world: World) -> PretrainedWeights:
    """The weights that `run.init_from` names, in host memory.

    There are none if it names none, or if `run.dir` has a checkpoint to resume from: then only the
    normalisation is known, from that checkpoint.

    Args:
        run: its `dir`, `fresh` and `init_from` count.
        model: the model that the weights are for.
        world: the processes; the first on each machine downloads for the others.

    Raises:
        UserError: if there is no such file, or it holds anything but weights.
    """
    checkpoints = Path(run.dir, "checkpoints")
    if not run.init_from:
        return PretrainedWeights("random weights")
    if (checkpoints / "last.pt").exists() and not run.fresh:
        note = "weights of this run; --run.init-from was for its start"
        return PretrainedWeights(note, **saved_normalisation(checkpoints))
    is_published = run.init_from == PUBLISHED
    path = download(model.name, world) if is_published else Path(run.init_from)
    if not path.is_file():
        raise UserError(f"there is no checkpoint {str(path)!a}")
    found = read_safetensors(path) if path.suffix == ".safetensors" else read_torch(path)
    found = replace(found, weights=unwrapped(found.weights))
    return found if found.mean else replace(found, **usual_normalisation(model.name))


def read_torch(path: Path) -> PretrainedWeights:
    """The weights in a file of torch's, by the names that it has for them."""
    note = f"weights from {str(path)!a}"
    # The training scripts of timm and torchvision save their arguments as a `Namespace`.
    with torch.serialization.safe_globals([Namespace]):
        saved, _ = read_saved(path, needs_archive=False)
    if isinstance(saved, dict) and CHECKPOINT.keys() - {"files?"} <= saved.keys():
        best = load_best(path)
        return PretrainedWeights(note, best.weights, best.classes, best.mean, best.std)
    saved = saved if isinstance(saved, dict) else {}
    inner = (saved[name] for name in ENTRIES if isinstance(saved.get(name), dict))
    entries = next(inner, saved).items()
    named = ((name, w) for name, w in entries if isinstance(name, str) and isinstance(w, Tensor))
    weights = {name: weight.detach() for name, weight in named}
    if not weights:
        raise UserError(f"{str(path)!a} holds no weights: neither a state dict nor a checkpoint")
    try:
        check_form(weights, WEIGHTS)
    except FormError as error:
        raise UserError(f"{str(path)!a} holds weights that no model takes: {error}") from error
    return PretrainedWeights(note, weights)


def read_safetensors(path: Path) -> PretrainedWeights:
    """The weights in a file of safetensors; ours also says which images they were trained on."""
    note = f"weights from {str(path)!a}"
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        known = {}
        if about.keys() >= IMAGES.keys():
            known = {name: json.loads(about[name]) for name in IMAGES}
            check_form(known, IMAGES)
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        raise UserError(f"--run.init-from {str(path)!a}: {error}") from error
    return PretrainedWeights(note, weights, **{name: tuple(row) for name, row in known.items()})


def unwrapped(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """`weights` by the names that our models have: without wrappers and auxiliary outputs."""
    weights = {name: w for name, w in weights.items() if name != "n_averaged"}
    for wrapper in WRAPPERS:
        consume_prefix_in_state_dict_if_present(weights, wrapper)
    return {
        OLD_DENSENET.sub(r"\1\2.", name): weight
        for name, weight in weights.items()
        if not name.startswith(AUXILIARY_HEADS)
    }


def shapes_misfit(
    theirs: dict[str, torch.Size], own: dict[str, torch.Size], in_head: set[str]
) -> str:
    """Why weights of these shapes don't fit a model, and what to do; "" if they do.

    Those `in_head` may have any shape.
    """
    alone = sorted((theirs.keys() ^ own.keys()) - in_head)
    if alone := tuple(name for name in alone if not name.endswith(OPTIONAL)):
        return f"only one of the two has {some(alone)}"
    for name, right in own.items():  # in the order of the layers
        shape = theirs.get(name, right)
        if name in in_head or shape == right:
            continue
        reason = f"{name} has shape {tuple(shape)}, not {tuple(right)}"
        if len(shape) == len(right) == 4 and shape[:2] == right[:2]:
            stem = "imagenet" if shape > right else "small"
            return f"{reason}; --model.stem {stem} has the first layer that they are for"
        if "pos" in name:
            return f"{reason}; take the --data.image-size that they are for"
        return reason
    return ""


def saved_normalisation(checkpoints: Path) -> dict[str, Colours]:
    """Mean and std of the run with these checkpoints, from the newest that is not damaged."""
    for path in (checkpoints / "last.pt", *sorted(checkpoints.glob("step_*.pt"), reverse=True)):
        try:
            saved = read_checkpoint(path)
        except DamagedError:  # `Checkpoints.resume` says so
            continue
        return {"mean": tuple(saved["mean"]), "std": tuple(saved["std"])}
    return {}


def usual_normalisation(name: str) -> dict[str, Colours]:
    """Mean and std that the published weights of the model `name` expect; none if unknown."""
    if name in AUXILIARY:  # with their weights torchvision's own models undo ImageNet's and do this
        return {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
    if name.startswith(PREFIX):
        images = pretrained_config(name)
    else:
        published = published_weights(name)
        images = published and published.transforms()
    known = images is not None and images.mean
    return {"mean": tuple(images.mean), "std": tuple(images.std)} if known else {}


def download(name: str, world: World) -> Path:
    """The file of torchvision's weights of the model `name`, downloaded once per machine."""
    published = published_weights(name)
    if published is None:
        raise UserError(
            f"--run.init-from {PUBLISHED}: torchvision has no weights of {name}; "
            "give the file of some, or take one of its models, such as resnet50"
        )
    path = Path(torch.hub.get_dir(), "checkpoints", Path(published.url).name)
    checksum = torch.hub.HASH_REGEX.search(path.name)
    with world.local_main_first():
        if path.is_file():
            return path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(
                published.url, str(path), checksum and checksum[1], progress=sys.stderr.isatty()
            )
        except (OSError, RuntimeError, HTTPException) as error:
            raise UserError(
                f"the weights of {name} can't be downloaded ({error}): fetch {published.url} where "
                f"there is a network, and start with --run.init-from {path.name}"
            ) from error
    return path
