"""The features of all images of a split, computed once and kept beside the images."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from ...config import FREE_TO_CHANGE, Config
from ...data import LEFT_OUT, Batch, EvalData, Source
from ...errors import FaultError
from ...models import find_head
from ...precision import Precision
from ...preprocess import Normalize
from ...runtime.config_dict import flatten
from ...runtime.console import clock
from ...runtime.files import write_whole
from ..cache_folder import cache_folder
from ..features import predict_features
from ..progress import Progress

# The sections of knobs on which features depend, and the knobs in them that do not matter.
SEEN, UNSEEN = ("data.", "model.", "augment.tta", "precision"), (*FREE_TO_CHANGE, "data.batch_size")
MOST_FILES = 16  # that a cache folder keeps: two for each network and set of images


@dataclass(frozen=True)
class Features:
    """The features of the images of a split, which `evaluate` takes for the images."""

    source: Source
    values: Tensor  # (count, width) float32, in host memory
    labels: Tensor  # (count,) int64; LEFT_OUT for an unreadable image
    batch_size: int
    device: torch.device
    note: str  # where they come from
    scale: float = 1.0  # what the network multiplies the outputs of its last layer by

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self) -> Iterator[Batch]:
        """All features in order."""
        for part in torch.arange(len(self)).split(self.batch_size):
            pixels = self.values[part, None, None]  # of one pixel, (batch, 1, 1, width)
            yield Batch(pixels.to(self.device), self.labels[part].to(self.device))

    def views(self, images: Tensor) -> Iterator[tuple[Tensor, float]]:
        """As `Normalize.views`: the features (batch, width), and the weight of their logits."""
        yield images.flatten(1), self.scale


def compute_features(
    config: Config, data: EvalData, model: nn.Module, normalize: Normalize, precision: Precision
) -> Features:
    """The features of the images of `data`, in evaluation; read from the cache if they are there.

    Raises:
        UserError: if the network has none, or an image cannot be read.
        FaultError: if memory does not suffice, too many cannot be read, or a worker was killed.
    """
    name = f"features-{digest(config, data.source, model)}.safetensors"
    path, began = cache_folder(config.data) / name, monotonic()
    with suppress(OSError, SafetensorError, KeyError):
        saved, note = load_file(path), f"read from {str(path)!a}"
        kept = saved["features"], saved["labels"]
        return Features(data.source, *kept, data.batch_size, normalize.shift.device, note)
    progress, found, labels, done = Progress(len(data)), [], [], 0
    try:
        for batch in data.batches():
            found.append(predict_features(model, batch.images, normalize, precision)[1].cpu())
            labels.append(batch.labels.cpu())
            progress.show(done := done + len(found[-1]))
    except torch.OutOfMemoryError as error:
        size = config.data.batch_size
        raise FaultError(f"out of memory: give a smaller --data.batch-size than {size}") from error
    kept = torch.cat(found), torch.cat(labels)
    if not (kept[1] == LEFT_OUT).any():  # else it must be noted each time
        content = save({"features": kept[0], "labels": kept[1]})
        with suppress(OSError):  # a folder that can't be written: they are computed again
            path.parent.mkdir(exist_ok=True)
            write_whole(path, lambda file: file.write(content))
            forget_oldest(path.parent)
    note = f"computed in {clock(monotonic() - began)}"
    return Features(data.source, *kept, data.batch_size, normalize.shift.device, note)


def forget_oldest(folder: Path) -> None:
    """Delete all but the newest features of a cache folder."""
    found = sorted(folder.glob("features-*.safetensors"), key=lambda path: path.stat().st_mtime_ns)
    for path in found[:-MOST_FILES]:
        path.unlink(missing_ok=True)


def digest(config: Config, source: Source, model: nn.Module) -> str:
    """A digest of all that features depend on: weights but the last layer's, images, knobs."""
    known, (head, _) = hashlib.blake2b(digest_size=8), find_head(model)
    for name, weight in model.state_dict().items():
        if not name.startswith(f"{head}."):
            known.update(name.encode())
            known.update(weight.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    knobs = {
        knob: value
        for knob, value in flatten(config).items()
        if knob.startswith(SEEN) and not knob.startswith(UNSEEN)
    }
    images = source.fingerprint(), source.file_digests(), source.mean, source.std
    known.update(json.dumps([knobs, images]).encode())
    return known.hexdigest()
