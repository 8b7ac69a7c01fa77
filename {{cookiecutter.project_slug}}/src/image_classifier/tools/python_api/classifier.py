"""A trained model in a program: labels and probabilities as `predict` and `evaluate` have them."""

import copy
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard, cast, overload

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ...checkpoints import LoadedModel, load_model, place_model
from ...config import ComputeConfig
from ...data import BadImageError, PathList, decode_image, dtype_of, fit_square, unreadable
from ...errors import FaultError, UserError
from ...extensions import need_tool
from ...runtime.distributed import World, choose_device
from ...runtime.machine import num_cores
from ..predict.rows import Row, judge, unread
from ..torch_dataset.conversion import to_pixels

ImageFile = str | os.PathLike[str] | BinaryIO | bytes | bytearray | Image.Image  # bytes: of a file
Pixels = np.ndarray | Tensor  # (height, width, channels), (channels, height, width): uint8, uint16
OneImage = ImageFile | Pixels
Images = OneImage | Iterable[OneImage]  # pixels of four dimensions are several
Part = tuple[list[OneImage], Tensor, list[str]]  # images, (count, channels, side, side), errors


class Classifier:
    """A trained model with the preprocessing of its evaluation; threads may share one."""

    def __init__(self, trained: LoadedModel) -> None:
        """Of a model that is on its device."""
        self.trained = trained

    def __repr__(self) -> str:
        """How many classes it knows, where it is from and where it is."""
        return f"<Classifier of {len(self.classes)} classes: {self.trained.path}, {self.device}>"

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the probabilities."""
        return self.trained.classes

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.trained.precision.device

    @overload
    def predict(self, images: ImageFile, top_k: int = 5, batch_size: int = 64) -> Row: ...
    @overload  # of four dimensions: list[Row]
    def predict(self, images: Pixels, top_k: int = 5, batch_size: int = 64) -> Any: ...  # noqa: ANN401
    @overload
    def predict(
        self, images: Iterable[OneImage], top_k: int = 5, batch_size: int = 64
    ) -> list[Row]: ...
    def predict(self, images: Images, top_k: int = 5, batch_size: int = 64) -> Row | list[Row]:
        """What the model says of an image, or of each of several, as `predict --out` has it.

        A row has the `label`, its `probability`, the `top` classes with theirs, and the `path` if
        there is one; of a model of several labels also `labels`, of one that abstains `decision`.
        Among several images, one that can't be read has an `error`, and no label.

        Raises:
            BadImageError: if the only image can't be read.
            UserError: if something is no image, or has other channels.
        """
        rows = []
        top_k = max(1, min(top_k, len(self.classes)))
        for part, pixels, errors in self._parts(images, batch_size):
            found = judge(self.trained, self.trained.logits(pixels), top_k)
            for image, row, error in zip(part, found, errors, strict=True):
                row["path"] = os.fspath(image) if isinstance(image, str | os.PathLike) else ""
                rows.append(unread(row, error) if error else row)
        if not is_one(images):
            return rows
        if rows[0]["error"]:
            raise BadImageError(name_of(images), rows[0]["error"])
        return rows[0]

    def probabilities(self, images: Images, batch_size: int = 64) -> Tensor:
        """Calibrated probabilities: (count, classes) float32 on the CPU, one row for one image.

        Raises:
            BadImageError: if an image can't be read.
            UserError: if something is no image, or has other channels.
        """
        parts = self._readable(images, batch_size)
        trained = self.trained
        found = [trained.probabilities(trained.logits(pixels)).cpu() for pixels in parts]
        return torch.cat(found) if found else torch.empty(0, len(self.classes))

    def features(self, images: Images, batch_size: int = 64) -> Tensor:
        """What the last layer gets of each image: (count, width) float32 on the CPU.

        Raises:
            BadImageError: if an image can't be read.
            UserError: if something is no image, or the network has no such features.
        """
        trained = self.trained
        if hasattr(trained.model, "each_network"):
            raise UserError("an ensemble has no features: load one of its runs")
        weights = (*trained.model.parameters(), *trained.model.buffers())
        shared = {id(weight): weight for weight in weights}
        model = copy.deepcopy(trained.model, shared)  # other threads would run into its hook
        own = replace(trained, model=model)
        parts = self._readable(images, batch_size)
        found = [own.features(pixels)[1].cpu() for pixels in parts]
        return torch.cat(found) if found else torch.empty(0, 0)

    def _readable(self, images: Images, batch_size: int) -> Iterator[Tensor]:
        """The pixels of `_parts`, all of which can be read.

        Raises:
            BadImageError: if one can't.
        """
        for part, pixels, errors in self._parts(images, batch_size):
            for image, error in zip(part, errors, strict=True):
                if error:
                    raise BadImageError(name_of(image), error)
            yield pixels

    def _parts(self, images: Images, batch_size: int) -> Iterator[Part]:
        """So many images at a time, decoded and made squares by all cores, on the device."""
        if batch_size < 1:
            raise UserError(f"batch_size {batch_size} is not 1 or more")
        data = self.trained.config.data
        shape = (data.eval_size, data.eval_size, data.channels)
        left = each_of(images)
        with ThreadPoolExecutor(num_cores()) as pool:
            while part := list(islice(left, batch_size)):
                with torch.inference_mode(False):  # that of a caller is not that of the threads
                    pixels = torch.empty((len(part), *shape), dtype=dtype_of(data.bits))
                errors = list(pool.map(self._fill, pixels, part))
                yield part, pixels.permute(0, 3, 1, 2).to(self.device), errors

    def _fill(self, place: Tensor, image: OneImage) -> str:
        """Write an image to its place, (side, side, channels); returns why it can't be read."""
        data = self.trained.config.data
        try:
            pixels = read_pixels(image, data.channels, data.bits)
        except BadImageError as error:
            place.zero_()
            return error.reason
        fit_square(pixels, place, data.fit, self.trained.mean)
        return ""


def load_runs(runs: list[str], device: str) -> Classifier:
    """The trained model of a run, or of several; see `load`."""
    place = open_device(device)
    world = World(place)
    kind: Any = place.type  # one that the config knows
    compute = ComputeConfig(device=kind)
    if len(runs) == 1:
        return Classifier(load_model(runs[0], compute, world))
    tool = need_tool("ensemble", "ensemble", "to load several runs as one")
    joined = tool.join(tool.load_members(runs))
    return Classifier(place_model(joined, compute, world))


def open_device(name: str) -> torch.device:
    """A device by its name.

    Raises:
        UserError: if there is none.
    """
    kind, _, number = name.partition(":")
    is_known = kind in ("cpu", "cuda", "mps") or name == "auto"
    if not is_known or (number and not number.isdecimal()):
        raise UserError(f"device {name!a} is none of auto, cpu, cuda, cuda:1 and mps")
    count = torch.cuda.device_count() if kind == "cuda" else 1
    if number and 0 < count <= int(number):  # of none, it is told below why
        raise UserError(f"device {name!a} is not there")
    # The current one from here on: else GPU 0 gets a context too, which takes half a GB of it.
    return choose_device(kind, int(number or 0), 1)[0]


def each_of(images: Images) -> Iterator[OneImage]:
    """The only image, or each of several."""
    return iter([images] if is_one(images) else cast("Iterable[OneImage]", images))


def is_one(images: Images) -> TypeGuard[OneImage]:
    """Whether it is one image, and not several."""
    if isinstance(images, np.ndarray | Tensor):
        return images.ndim < 4
    is_file = hasattr(images, "read")
    return is_file or isinstance(images, str | os.PathLike | bytes | bytearray | Image.Image)


def name_of(image: OneImage) -> str:
    """An image in a message."""
    return os.fspath(image) if isinstance(image, str | os.PathLike) else type(image).__name__


def read_pixels(image: OneImage, channels: int, bits: int) -> Tensor:
    """An image as (height, width, channels) of so many bits.

    Raises:
        BadImageError: if a file or its content can't be read.
        UserError: if it is no image, or has other channels.
        FaultError: if the system is out of memory or file descriptors.
    """
    if isinstance(image, str | os.PathLike):
        return PathList(Path(), [os.fsencode(image)]).image(0, channels, bits)
    try:
        image = image.read() if hasattr(image, "read") else image
        if isinstance(image, bytes | bytearray):
            return decode_image(bytes(image), channels, bits)
        return to_pixels(image, channels, bits)
    except (UserError, FaultError):
        raise
    except Exception as error:  # of any kind: it is damaged
        raise unreadable(type(image).__name__, error) from error
