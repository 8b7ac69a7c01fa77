"""The features of images: what the last layer of a network gets.

Those of a whole split are computed once, and kept beside the images.
"""

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..checkpoints import DamagedError, read_file
from ..config import FREE_TO_CHANGE, Config
from ..data import LEFT_OUT, EvalData, cache_folder
from ..errors import UserError, smaller_batch_on_oom
from ..evaluate import predict_logits
from ..models import find_head
from ..precision import Precision
from ..preprocess import VIEWS, Normalize
from ..runtime.config_dict import to_save
from ..runtime.console import Progress, clock
from ..runtime.distributed import World
from ..runtime.files import write_whole

# The sections of knobs on which features depend, and the knobs in them that do not matter.
SEEN = ("data.", "model.", "augment.tta", "precision")
UNSEEN = (*FREE_TO_CHANGE, "data.batch_size", "data.balance", "model.dropout")
MOST_FILES = 16  # of features that a cache folder keeps
VERSION = 3  # of these files, and of the pixels that images are decoded to


class Features(NamedTuple):
    """The features of a split, in host memory, the same on every rank."""

    values: Tensor  # (count, width) float32
    labels: Tensor  # as the dataset has them; LEFT_OUT for an unreadable image
    note: str  # where they come from


@torch.inference_mode()
def predict_features(
    model: nn.Module, images: Tensor, normalize: Normalize, precision: Precision
) -> tuple[Tensor, Tensor]:
    """Logits (batch, classes) and features (batch, width) of images, both float32.

    Both are averaged over the views of evaluation. `model` is in evaluation mode; `images` is
    (batch, 3, size, size) uint8, channels_last.

    Raises:
        UserError: if the last layer gets more than a vector for each image.
    """
    name, head = find_head(model)
    inputs: list[Tensor] = []  # of each view
    hook = head.register_forward_pre_hook(lambda _, given: inputs.append(given[0].float()))
    try:
        logits = predict_logits(model, images, normalize, precision)
    finally:
        hook.remove()
    shape = tuple(inputs[0].shape[1:])
    if shape[1:].count(1) < len(shape) - 1:
        raise UserError(
            f"the network has no features: its last layer {name!r} gets {shape} for an image, and "
            "not one vector"
        )
    weights = [weight for weight, *_ in VIEWS[normalize.tta]]
    features = sum(w * found.flatten(1) for w, found in zip(weights, inputs, strict=True))
    return logits, features


def compute_features(  # noqa: PLR0917 - what it takes to predict
    config: Config,
    data: EvalData,
    model: nn.Module,
    normalize: Normalize,
    precision: Precision,
    world: World,
) -> Features:
    """The features of all images of `data`, in evaluation; from the cache if they are there.

    Each rank computes those of its images.

    Raises:
        UserError: if the network has none, or an image cannot be read.
        FaultError: if memory does not suffice, too many cannot be read, or a worker was killed.
    """
    path = cache_folder(config.data) / f"features-{digest(config, data, model)}.pt"
    began = monotonic()
    kept = None
    with suppress(DamagedError, UserError):  # there is none, or it is not what was written
        kept, _ = read_file(path)
    if world.all_true(kept is not None):
        return Features(*kept, f"read from {str(path)!a}")
    damage = f", as {str(path)!a} is damaged" * path.exists()
    was_training = model.training
    values, labels = features_of(model.eval(), data, normalize, precision, world)
    model.train(was_training)
    if world.is_main and not left_out(labels).any():  # an unreadable image must be noted each time
        with suppress(OSError):  # a folder that can't be written: they are computed again
            path.parent.mkdir(exist_ok=True)
            write_whole(path, lambda file: torch.save((values, labels), file))
            forget_oldest(path.parent)
    return Features(values, labels, f"computed in {clock(monotonic() - began)}{damage}")


def features_of(
    model: nn.Module, data: EvalData, normalize: Normalize, precision: Precision, world: World
) -> tuple[Tensor, Tensor]:
    """Features and labels of all images of `data`, of which each rank computes its part."""
    progress = Progress(len(data))
    found = []
    labels = []
    done = 0
    with smaller_batch_on_oom("--data.batch-size", data.data.batch_size):
        for batch in data.batches():
            found.append(predict_features(model, batch.images, normalize, precision)[1])
            labels.append(batch.labels)
            done += len(found[-1]) * world.size
            if world.is_main:
                progress.show(min(done, len(data)))
    gathered = []
    for parts in (found, labels):
        part = torch.cat(parts)
        table = part.new_zeros((len(data), *part.shape[1:]))
        table[world.rank :: world.size] = part
        gathered.append(world.all_reduce_sum(table).cpu())
    return tuple(gathered)


def left_out(labels: Tensor) -> Tensor:
    """Which images can't be read, or have no known label: (count,) bool."""
    return (labels == LEFT_OUT).view(len(labels), -1).all(dim=1)


def forget_oldest(folder: Path) -> None:
    """Delete all but the newest features of a cache folder."""
    found = sorted(folder.glob("features-*"), key=lambda path: path.stat().st_mtime_ns)
    for path in found[:-MOST_FILES]:
        path.unlink(missing_ok=True)


def digest(config: Config, data: EvalData, model: nn.Module) -> str:
    """A digest of all that features depend on: weights but the last layer's, images, knobs."""
    known = hashlib.blake2b(digest_size=8)
    head, _ = find_head(model)
    for name, weight in model.state_dict().items():
        if not name.startswith(f"{head}."):
            known.update(name.encode())
            known.update(weight.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    knobs = {
        knob: value
        for knob, value in to_save(config).items()
        if knob.startswith(SEEN) and not knob.startswith(UNSEEN)
    }
    source = data.source
    images = source.fingerprint(), source.file_digests(), source.mean, source.std
    known.update(json.dumps([VERSION, knobs, images]).encode())
    return known.hexdigest()
