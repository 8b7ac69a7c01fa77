r"""The list of files that training leaves out; users may edit it.

    train/ant/4.jpg    truncated

Each line is a path below `data.root`, a tab, and a reason. Bytes that cannot be printed are escaped
as `\xff`, and a backslash as two.
"""

import os
from dataclasses import replace
from pathlib import Path

import torch

from ...config import DataConfig
from ...errors import UserError
from ...runtime.console import path_of, printable_path
from ...runtime.files import open_plain
from .prepared import cache_folder
from .source import Source

NAME = "quarantine.txt"


def quarantine_path(data: DataConfig) -> Path:
    """The path of the list, in the dataset's cache."""
    return cache_folder(data) / NAME


def read_quarantine(data: DataConfig) -> dict[bytes, str]:
    """Reasons by path below `data.root`; empty if there is no list.

    Raises:
        UserError: if the list is unreadable.
    """
    path = quarantine_path(data)
    try:
        with open_plain(path) as file:
            text = file.read().decode()
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read the list {str(path)!a}: {reason}") from error
    lines = (line.partition("\t") for line in text.split("\n") if line.strip())
    return {path_of(name.rstrip("\r")): reason.strip() for name, _, reason in lines}


def without_quarantine(source: Source, data: DataConfig, split: str) -> Source:
    """The images of `source` that are not on the list; a note says how many are left out.

    Raises:
        UserError: if the list is unreadable, or leaves out a whole class or split.
    """
    listed = read_quarantine(data)
    if not listed or source.paths is None:
        return source
    paths = source.paths
    kept = torch.tensor(
        [paths.from_folder(data.root, index) not in listed for index in range(len(paths))]
    )
    where, notes = ascii(str(quarantine_path(data))), []
    had = source.labels.bincount(minlength=len(source.classes))
    has = source.labels[kept].bincount(minlength=len(source.classes))
    emptied = ((had > 0) & (has == 0)).nonzero()[:, 0].tolist()
    if emptied and (split == "train" or not kept.any()):
        raise UserError(
            f"class {source.classes[emptied[0]]!a} has no {split} images: "
            f"all {int(had[emptied[0]])} are left out, as {where} says"
        )
    if num_out := int((~kept).sum()):
        images = "image is" if num_out == 1 else "images are"
        notes.append(f"{num_out:,} {split} {images} left out, as {where} says")
    root = os.fsencode(data.root)
    asked = sorted(listed) if split == "train" else []  # once is enough
    gone = [path for path in asked if not os.path.lexists(os.path.join(root, path))]
    if gone:
        notes.append(
            f"{where}: {len(gone):,} of its lines name no file: {printable_path(gone[0])!a}"
        )
    left = source if kept.all() else source.picked(kept.nonzero()[:, 0])
    return replace(left, notes=(*source.notes, *notes))
