"""The file of `--embeddings`: the features of each image, in the order of the rows."""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from ...data import PathList
from ...errors import UserError
from ...runtime.files import write_whole

SUFFIXES = (".npy", ".safetensors")


class Embeddings:
    """Features of images, in host memory until all are there."""

    def __init__(self, path: Path, files: PathList, fresh: bool) -> None:
        """Begin `path`, a row for each of `files`.

        Raises:
            UserError: if its suffix is none of ours, or it exists and is not to be replaced.
        """
        if path.suffix not in SUFFIXES:
            raise UserError(f"--embeddings {str(path)!a} ends in none of {', '.join(SUFFIXES)}")
        if path.exists() and not fresh:
            raise UserError(f"{str(path)!a} exists already: --fresh replaces it when all is done")
        if not path.parent.is_dir():
            raise UserError(f"--embeddings {str(path)!a}: there is no folder {str(path.parent)!a}")
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
        """Write the file: an array, or `features` and the NUL-separated names, `paths`."""
        if self.path.suffix == ".npy":
            write_whole(self.path, lambda file: np.save(file, self.rows.numpy()))
            return
        names = b"\0".join(self.files.relative(n) for n in range(len(self.files)))
        paths = torch.frombuffer(bytearray(names), dtype=torch.uint8)
        content = save({"features": self.rows, "paths": paths})
        write_whole(self.path, lambda file: file.write(content))
