"""What checkpoints hold, read without running anything that may be in them."""

import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .config import Config, UserError, unflatten
from .datasets.source import Source


class DamagedError(Exception):
    """A file that is not a whole checkpoint."""


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What was saved, as tensors in host memory and plain values.

    Raises:
        DamagedError: if the file is not what was written.
        UserError: if it holds anything but tensors and plain values.
    """
    check_archive(path)
    saved = load_plain(path)
    if not is_checkpoint(saved):
        raise UserError(f"{str(path)!a} is not a checkpoint of this project")
    return saved


def check_archive(path: Path) -> None:
    """Look at the checksums of what torch has saved, and at its sizes: `torch.load` does not.

    Raises:
        DamagedError: if the file is not what was written.
        UserError: if it is a program.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
            # We compress nothing: what would unpack to more than the file is a bomb.
            is_bomb = sum(record.file_size for record in records) >= path.stat().st_size or any(
                record.compress_type != zipfile.ZIP_STORED for record in records
            )
            damaged = None if is_bomb else archive.testzip()
            is_program = any(name.endswith("/constants.pkl") for name in archive.namelist())
    # A hostile archive raises more than BadZipFile: of unknown compression, of a password.
    except (zipfile.BadZipFile, OSError, EOFError, RuntimeError, ValueError) as error:
        raise DamagedError(f"{str(path)!a} is damaged: {error}") from error
    if is_program:
        raise UserError(f"refusing to load {str(path)!a}: it is a program (TorchScript)")
    if damaged or is_bomb:
        reason = f"wrong checksum of {damaged!a}" if damaged else "more inside than it is long"
        raise DamagedError(f"{str(path)!a} is damaged: {reason}")


def load_plain(path: Path) -> Any:  # noqa: ANN401 - whatever a file may hold
    """Tensors in host memory and plain values from a file; the one place that reads them.

    Raises:
        UserError: if it holds anything else.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # Not torch's own words, which advise to load it all the same.
        name = re.search(r"GLOBAL (\S+)", str(error))
        found = f" ({ascii(name[1])[1:-1]})" if name else ""
        raise UserError(
            f"refusing to load {str(path)!a}: "
            f"it holds objects other than tensors and plain values{found}"
        ) from error


def is_checkpoint(saved: Any) -> bool:  # noqa: ANN401 - whatever a file may hold
    """Whether `saved` has all that `Checkpoints.save` writes."""
    try:
        state, config, classes = saved["state"], saved["config"], saved["classes"]
        weights = state["ema"] or state["model"]
        return (
            {"fingerprint", "report"} <= saved.keys()
            and all(isinstance(n, float) for n in (*saved["mean"], *saved["std"]))
            and isinstance(state["step"], int)
            and all(isinstance(weight, Tensor) for weight in weights.values())
            and all(isinstance(knob, str) for knob in config)
            and all(isinstance(name, str) for name in classes)
        )
    except (TypeError, KeyError, AttributeError):
        return False


@dataclass(frozen=True)
class Best:
    """What is needed to use a trained model."""

    weights: dict[str, Tensor]  # that were evaluated: the averaged ones where there are any
    config: Config
    step: int
    images: Source  # that it learned from: their classes, mean and deviation, and no pixels


def load_best(path: Path) -> Best:
    """The weights of a checkpoint with all that is needed to use them.

    Raises:
        UserError: if there is no such file, or it can't be used.
    """
    if not path.is_file():
        raise UserError(f"there is no checkpoint {str(path)!a}")
    try:
        saved = read_checkpoint(path)
    except DamagedError as error:
        raise UserError(str(error)) from error
    state = saved["state"]
    try:
        config = unflatten(saved["config"])
    except (TypeError, KeyError) as error:  # a knob that there is no more
        raise UserError(f"{str(path)!a} is of another version of this project: {error}") from error
    return Best(
        weights=state["ema"] or state["model"],
        config=config,
        step=state["step"],
        images=Source(
            labels=torch.empty(0, dtype=torch.int64),
            classes=tuple(saved["classes"]),
            pixels=torch.empty((0, 1, 1, 3), dtype=torch.uint8),
            mean=tuple(saved["mean"]),
            std=tuple(saved["std"]),
        ),
    )


def misfit(path: Path, error: Exception) -> str:
    """What to say when a checkpoint's weights don't fit the model: the first of torch's reasons."""
    reasons = [line.strip() for line in str(error).splitlines()]
    return f"{str(path)!a} holds another model: {reasons[1] if len(reasons) > 1 else reasons[0]}"


def abbreviate(names: list[str], most: int = 3) -> str:
    """The first few names."""
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")
