"""The features of a whole split, which are computed once and kept beside the images."""

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...checkpoints import DamagedError, read_file
from ...config import FREE_TO_CHANGE, Config
from ...data import LEFT_OUT, NO_CACHE, EvalData, cache_folder
from ...errors import UserError
from ...evaluate import predict_features
from ...models import find_head
from ...runtime.config_dict import to_save
from ...runtime.console import Progress, clock
from ...runtime.files import write_whole
from ...runtime.out_of_memory import smaller_batch_on_oom
from ...tracking import Setup

# The sections of knobs on which features depend, and the knobs in them that do not matter.
SEEN = ("data.", "model.", "augment.tta", "precision")
UNSEEN = (*FREE_TO_CHANGE, "data.batch_size", "data.balance", "model.dropout")
MOST_FILES = 16  # of features that a cache folder keeps
VERSION = 4  # of these files, and of the pixels that images are decoded to


class Features(NamedTuple):
    """The features of a split, in host memory, the same on every rank."""

    values: Tensor  # (count, width) float32
    labels: Tensor  # as the dataset has them; LEFT_OUT for an unreadable image
    note: str  # where they come from


def compute_features(setup: Setup, data: EvalData) -> Features:
    """The features of all images of `data`, in evaluation; from the cache if they are there.

    Each rank computes those of its images.

    Raises:
        UserError: if the network has none, or an image cannot be read.
        FaultError: if memory does not suffice, too many cannot be read, or a worker was killed.
    """
    config = setup.config
    world = setup.world
    model = setup.model
    path = cache_folder(config.data) / f"features-{digest(config, data, model)}.pt"
    began = monotonic()
    kept = None
    # What another reader returns is known by no digest.
    is_known = data.source.reader is None or data.source.recipe != ""
    is_cached = is_known and config.data.cache != NO_CACHE
    with suppress(DamagedError, UserError):  # there is none, or it is not what was written
        kept, _ = read_file(path) if is_cached else (None, "")
    if world.all_true(kept is not None):
        return Features(*kept, f"read from {str(path)!a}")
    damage = f", as {str(path)!a} is damaged" * (is_cached and path.exists())
    was_training = model.training
    model.eval()
    values, labels = features_of(setup, data)
    model.train(was_training)
    is_whole = not left_out(labels).any()  # an unreadable image must be noted each time
    if world.is_main and is_cached and is_whole:
        with suppress(OSError):  # a folder that can't be written: they are computed again
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, lambda file: torch.save((values, labels), file))
            forget_oldest(path.parent)
    return Features(values, labels, f"computed in {clock(monotonic() - began)}{damage}")


def features_of(setup: Setup, data: EvalData) -> tuple[Tensor, Tensor]:
    """Features and labels of all images of `data`, of which each rank computes its part."""
    world = setup.world
    progress = Progress(len(data))
    tables: list[Tensor] = []  # a row for each image, of which each rank fills its own
    done = 0
    with smaller_batch_on_oom("--data.batch-size", data.batch_size * world.size):
        for batch in data.batches():
            _, found = predict_features(setup.model, batch.images, setup.normalize, setup.precision)
            parts = found, batch.labels
            tables = tables or [part.new_zeros((len(data), *part.shape[1:])) for part in parts]
            for table, part in zip(tables, parts, strict=True):
                table[world.rank :: world.size][done : done + len(part)] = part
            done += len(found)
            if world.is_main:
                progress.show(min(done * world.size, len(data)))
    return tuple(world.all_reduce_sum(table).cpu() for table in tables)


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
    images = source.fingerprint(), source.file_digests, source.mean, source.std
    known.update(json.dumps([VERSION, knobs, images]).encode())
    if source.paths is not None:  # sizes, and when each file was changed
        known.update(source.paths.stats().contiguous().numpy().data)
    return known.hexdigest()
