"""The file of `--embeddings`: the features of each image, in the order of the rows."""

import glob
import os
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from ...data import PathList
from ...errors import FaultError, UserError
from ...runtime.console import say
from ...runtime.files import remove_leftovers, write_whole
from .output import check_free

SUFFIXES = (".npy", ".safetensors")


class Embeddings:
    """Features of images, in host memory until all are there."""

    def __init__(self, path: Path, files: PathList, fresh: bool) -> None:
        """Begin `path`, a row for each of `files`; UserError if that is no place for them."""
        check_free("--embeddings", path, SUFFIXES, fresh)
        if not os.access(f"{path.parent}/", os.W_OK):
            raise UserError(f"--embeddings {str(path)!a}: there is no folder that can be written")
        self.path = path
        self.files = files
        self.rows = torch.empty(0)  # (count, width) float32; NaN for an unreadable file

    def add(self, first: int, features: Tensor, errors: dict[int, str]) -> None:
        """Keep the `features`, (batch, width), of the images from number `first` on.

        `errors` says which images cannot be read, by their numbers.
        """
        if not len(self.rows):
            self.rows = torch.full((len(self.files), features.shape[1]), torch.nan)
        good = [n for n in range(len(features)) if first + n not in errors]
        self.rows[[first + n for n in good]] = features[good].cpu()

    def save(self) -> None:
        """Write the file; FaultError if it cannot be written."""
        path = ascii(str(self.path))
        try:
            remove_leftovers(self.path.parent, glob.escape(self.path.name))
            write_whole(self.path, self.write)
        except OSError as error:
            raise FaultError(f"cannot write {path}: {error.strerror or error}") from error
        count, width = self.rows.shape
        say(f"{path}: {count:,} rows of {width:,} features; NaN where a file cannot be read")

    def write(self, file: BinaryIO) -> None:
        """Write an array; or `features`, and the names of the files, NUL-separated, as `paths`."""
        if self.path.suffix == ".npy":
            np.save(file, self.rows.numpy())
            return
        names = b"\0".join(self.files.relative(n) for n in range(len(self.files)))
        paths = torch.frombuffer(bytearray(names), dtype=torch.uint8)
        file.write(save({"features": self.rows, "paths": paths}))
