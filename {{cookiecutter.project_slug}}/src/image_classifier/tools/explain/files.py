"""The pictures of `predict --explain`: images with the places that speak for their class."""

import re
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from ...checkpoints import LoadedModel
from ...data import NO_CLASS
from ...errors import FaultError, UserError
from ...runtime.files import write_whole
from . import heat

MOST = 1000  # pictures that somebody will look at
UNSAFE = re.compile(r"[^\w.-]+")  # in the name of a file


def open_folder(folder: Path, count: int) -> None:
    """Make the folder of `--explain`; a new one is marked, as its pictures are of no class.

    Raises:
        UserError: if that can't be done, or there are too many images.
    """
    if count > MOST:
        raise UserError(
            f"--explain writes a PNG for each image, of {MOST:,} at most: there are "
            f"{count:,}, name fewer"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not any(folder.iterdir()):
            (folder / NO_CLASS).touch()
    except OSError as error:
        raise UserError(f"--explain {str(folder)!a}: {error.strerror}") from error


def write_pictures(  # noqa: PLR0917 - what a picture shows, and its name
    folder: Path,
    trained: LoadedModel,
    images: Tensor,
    classes: Tensor,
    rows: list[dict[str, Any]],
    first: int,
) -> None:
    """Write what the model looked at in each image of a batch that could be read.

    Names begin with the number of the image, as several files may have the same.

    Raises:
        FaultError: if a file can't be written.
    """
    maps = heat.heat_maps(trained.model, trained.normalize(images), classes)
    pictures = heat.painted(images.permute(0, 2, 3, 1), maps).cpu().numpy()
    for number, (row, pixels) in enumerate(zip(rows, pictures, strict=True), first + 1):
        name = f"{number:04}-{UNSAFE.sub('_', Path(row['path']).stem)[:50]}.png"
        if not row["error"]:
            try:
                write_whole(folder / name, partial(Image.fromarray(pixels).save, format="png"))
            except OSError as error:
                path = ascii(str(folder / name))
                raise FaultError(f"cannot write {path}: {error.strerror}") from error
