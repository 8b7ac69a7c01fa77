"""What checkpoints hold, read without running anything that may be in them."""

import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from .config import Config, RunConfig, UserError, unflatten
from .datasets.source import Source


class DamagedError(Exception):
    """A file that is not a whole checkpoint."""


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What was saved, as tensors in host memory and plain values; the one place that reads them.

    Raises:
        DamagedError: if the file is not what was written: `torch.load` checks no checksum.
        UserError: if it holds anything but tensors and plain values.
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
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # Not torch's own words, which advise to load it all the same.
        name = re.search(r"GLOBAL (\S+)", str(error))
        found = f" ({ascii(name[1])[1:-1]})" if name else ""
        raise UserError(
            f"refusing to load {str(path)!a}: "
            f"it holds objects other than tensors and plain values{found}"
        ) from error
    if not is_checkpoint(saved):
        raise UserError(f"{str(path)!a} is not a checkpoint of this project")
    return saved


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
            mean=tuple(saved["mean"]),
            std=tuple(saved["std"]),
        ),
    )


def misfit(path: Path, error: Exception) -> str:
    """What to say when a checkpoint's weights don't fit the model: the first of torch's reasons."""
    reasons = [line.strip() for line in str(error).splitlines()]
    return f"{str(path)!a} holds another model: {reasons[1] if len(reasons) > 1 else reasons[0]}"


def init_from(run: RunConfig, model: nn.Module) -> str:
    """Take the weights of a checkpoint, or of a `.safetensors` file, and return a line on it.

    With no path, or where the run goes on, they stay as they are. A last layer for another number
    of classes stays random.

    Raises:
        UserError: if the file is missing or damaged, or of another model.
    """
    path = run.init_from
    if not path:
        return "random weights"
    if Path(run.dir, "checkpoints", "last.pt").exists() and not run.fresh:
        return "weights of this run; --run.init-from was for its start"
    if not Path(path).is_file():
        raise UserError(f"there is no checkpoint {path!a}")
    try:
        is_plain = path.endswith(".safetensors")
        weights = load_file(path) if is_plain else load_best(Path(path)).weights
    except (OSError, SafetensorError) as error:
        raise UserError(f"--run.init-from {path!a}: {error}") from error
    own = model.state_dict()
    missing = sorted(own.keys() ^ weights.keys())
    if missing:
        raise UserError(
            f"--run.init-from {path!a} has the weights of another model: "
            f"only one of the two has {abbreviate(missing)}"
        )
    unlike = [name for name, tensor in own.items() if weights[name].shape != tensor.shape]
    head = list(own)[-1].rpartition(".")[0]
    others = [name for name in unlike if name.rpartition(".")[0] != head]
    if others:
        raise UserError(
            f"--run.init-from {path!a} has the weights of another model: {others[0]} has "
            f"shape {tuple(weights[others[0]].shape)}, not {tuple(own[others[0]].shape)}"
        )
    model.load_state_dict({k: v for k, v in weights.items() if k not in unlike}, strict=False)
    kept = f"; {head} is new, for other classes" if unlike else ""
    return f"weights from {path!a}{kept}"


def abbreviate(names: list[str], most: int = 3) -> str:
    """The first few names."""
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")
