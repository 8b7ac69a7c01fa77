"""What checkpoints hold, read without running anything that may be in them."""

import hashlib
import os
import re
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ..config import Config
from ..errors import UserError
from ..runtime.config_dict import unflatten
from ..runtime.files import open_plain

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool)
DTYPES += (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

Colours = tuple[float, float, float]  # of red, green and blue, from 0 to 1


class DamagedError(UserError):
    """A file that is not what was written."""


class FormError(ValueError):
    """What was read does not have the form that it should have."""


@dataclass(frozen=True)
class Value:
    """A single value in a checkpoint: what it is called in messages, and which values fit."""

    name: str
    fits: Callable[[Any], bool]


def number(low: float, high: float, *kinds: type) -> Value:
    """A number from `low` to `high` of one of these types; never nan."""
    name = f"a {'whole ' * (float not in kinds)}number from {low:g} to {high:g}"
    return Value(name, lambda value: type(value) in kinds and low <= value <= high)


def is_dense(value: object) -> bool:
    """Whether a value is a tensor as models have them: in host memory, and not quantised."""
    return (
        type(value) is Tensor
        and value.device.type == "cpu"
        and value.layout == torch.strided
        and value.dtype in DTYPES
        and not value.is_nested
    )


def is_knob(value: object) -> bool:
    """Whether a knob may have this value; `unflatten` checks which."""
    if type(value) in (list, tuple):
        return all(type(one) in (str, float) for one in value)
    return type(value) in (str, bool, float) or (type(value) is int and abs(value) < 2**63)


# The form of a value: a dict by name ("?" marks what may be missing; other names may be there), a
# dict of any length by its type of key, a list of any length or (of several forms) of that length,
# a `Value`, or a tuple: a form and a `Value` that may be there instead.
Form = dict | list | tuple | Value

COUNT = number(0, 2**53, int)  # float64 holds each number up to here
TEXT = Value("text", lambda value: type(value) is str)
FLOAT = Value("a number", lambda value: type(value) is float)
NONE = Value("None", lambda value: value is None)
NOTHING = Value("an empty dict", lambda value: type(value) is dict and not value)
DENSE = Value("a dense tensor", is_dense)
WEIGHTS = {str: DENSE}
# What identifies the images that weights were trained on; `best.safetensors` has it as JSON.
IMAGES = {
    "classes": [TEXT],
    "mean": [number(-1e6, 1e6, int, float)] * 3,
    "std": [number(1e-6, 1e6, int, float)] * 3,
}
# What `Checkpoints.save` writes.
CHECKPOINT = {
    "state": {
        "step": COUNT,
        "best_top1": number(-1, 1, int, float),
        "best_step": number(-1, 2**53, int),
        "num_worse?": COUNT,
        "model": WEIGHTS,
        "ema": (WEIGHTS, NONE),
        "optimizer": {
            "state": {int: {str: (DENSE, NONE)}},
            "param_groups": [{"params": [COUNT]}],
        },
        "scaler": (
            {
                "scale": number(1e-38, 1e38, float),
                "growth_factor": number(1, 2**16, int, float),
                "backoff_factor": number(2**-16, 1, int, float),
                "growth_interval": number(1, 2**31 - 1, int),
                "_growth_tracker": number(0, 2**31 - 1, int),
            },
            NOTHING,
        ),
    },
    "config": {str: Value("the value of a knob", is_knob)},
    **IMAGES,
    "fingerprint": TEXT,
    "files?": {str: TEXT},
    "report": {"loss": FLOAT, "step": COUNT},
}


def check_form(value: Any, form: Form, where: str = "") -> None:  # noqa: ANN401 - any file's
    """Check that a value has a form.

    Raises:
        FormError: for the first part that has not, with its place: `state.step is -7, not ...`.
    """
    if isinstance(form, tuple):
        form, other = form
        form = other if other.fits(value) else form
    is_list, is_dict = type(value) in (list, tuple), isinstance(value, dict)
    parts: list[tuple[object, Form]] = []  # key and form of each
    expected = ""
    if isinstance(form, Value):
        expected = "" if form.fits(value) else form.name
    elif isinstance(form, list):
        if is_list and len(form) in (1, len(value)):
            parts = [(place, form[place % len(form)]) for place in range(len(value))]
        else:
            expected = "a list" + f" of {len(form)}" * (len(form) > 1)
    elif not is_dict:
        expected = "a dict"
    elif isinstance(kind := next(iter(form)), type):
        parts = [(key, form[kind]) for key in value]
        expected = "" if {kind}.issuperset(map(type, value)) else f"a dict by {kind.__name__}"
    else:
        if missing := [key for key in form if key not in value and not key.endswith("?")]:
            raise FormError(f"{where or 'it'} has no {missing[0]}")
        parts = [(key.removesuffix("?"), part) for key, part in form.items()]
        parts = [(key, part) for key, part in parts if key in value]
    if expected:
        raise FormError(f"{where or 'it'} is {describe(value)}, not {expected}")
    for key, part in parts:
        check_form(value[key], part, f"{where}.{str(key)[:80]}".removeprefix("."))


def describe(value: Any) -> str:  # noqa: ANN401 - whatever a file may hold
    """A value if it is short, or what it is."""
    if isinstance(value, str):
        return ascii(value[:40])
    is_short = isinstance(value, float | None) or (isinstance(value, int) and abs(value) < 2**64)
    return str(value) if is_short else f"a {type(value).__name__}"


def check_saved(saved: Any, path: Path) -> Config:  # noqa: ANN401 - whatever a file may hold
    """The config in what was read from `path`."""
    try:
        check_form(saved, CHECKPOINT)
        config, state = unflatten(saved["config"]), saved["state"]
        for is_wrong, reason in (
            (not saved["classes"] or not state["model"], "there are no classes, or no weights"),
            (
                state["ema"] is not None and shapes(state["model"]) != shapes(state["ema"]),
                "state.ema is not of the same model as state.model",
            ),
            (
                (state["ema"] is None) == bool(config.optim.ema_decay),
                "state.ema is there, or is not, other than optim.ema_decay says",
            ),
            (
                max(state["best_step"], saved["report"]["step"]) > state["step"],
                f"it is of step {state['step']}, and has what was later",
            ),
        ):
            if is_wrong:
                raise FormError(reason)
    except FormError as error:
        raise UserError(f"{str(path)!a} is not a checkpoint of this project: {error}") from error
    except (TypeError, UserError) as error:  # such as an unknown knob
        raise UserError(f"{str(path)!a} is of another version of this project: {error}") from error
    return config


def shapes(weights: dict[str, Tensor]) -> dict[str, torch.Size]:
    """The shape of each weight by its name."""
    return {name: weight.shape for name, weight in weights.items()}


def read_checkpoint(path: Path) -> dict[str, Any]:
    """All that `Checkpoints.save` wrote: tensors in host memory and plain values.

    Raises:
        DamagedError: if the file is not what was written.
        UserError: if it holds anything but what is written there.
    """
    saved, _ = read_saved(path)
    check_saved(saved, path)
    return saved


def read_saved(path: Path, needs_archive: bool = True) -> tuple[Any, str]:
    """What a file of torch's holds, and a digest of that very file.

    It is opened once, as another may get its name meanwhile. Files of torch before 1.6, as those of
    torchvision are, are no archives and have no checksums.

    Raises:
        DamagedError: if the file can't be read, or is not what was written.
        UserError: if it holds anything but tensors and plain values.
    """
    try:
        with open_plain(path) as file:
            if needs_archive or file.read(4) == b"PK\3\4":
                check_archive(file, path)
            saved = load_plain(file, path)
            file.seek(0)
            return saved, hashlib.file_digest(file, "blake2b").hexdigest()[:32]
    except OSError as error:
        raise DamagedError(f"{str(path)!a} is damaged: {error.strerror}") from error


def check_archive(file: BinaryIO, path: Path) -> None:
    """Check the checksums and sizes of what torch has saved: `torch.load` does not."""
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
            # We compress nothing: what would unpack to more than the file is a bomb.
            size = os.fstat(file.fileno()).st_size
            is_bomb = sum(record.file_size for record in records) >= size
            is_bomb |= any(record.compress_type != zipfile.ZIP_STORED for record in records)
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


def load_plain(file: BinaryIO, path: Path) -> Any:  # noqa: ANN401 - whatever a file may hold
    """Tensors in host memory and plain values from a file; the one place that reads them."""
    file.seek(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of tensors that are refused soon after
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        # Not torch's own words, which advise to load it all the same.
        reason = "it holds objects other than tensors and plain values"
        if name := re.search(r"GLOBAL (\S+)", str(error)):
            reason += f" ({ascii(name[1])[1:-1]})"
        else:
            reason = f"it is damaged, or {reason.removeprefix('it ')}"
        raise UserError(f"refusing to load {str(path)!a}: {reason}") from error


@dataclass(frozen=True)
class Best:
    """A trained model as its checkpoint has it: the weights, and what is needed to use them."""

    weights: dict[str, Tensor]  # those that were evaluated: the averaged ones where there are any
    config: Config
    step: int
    classes: tuple[str, ...]
    mean: Colours  # that training images were normalised by
    std: Colours
    digest: str  # of the file


def load_best(path: Path) -> Best:
    """The weights of a checkpoint with all that is needed to use them.

    Raises:
        UserError: if there is no such file, or it can't be used.
    """
    if not path.is_file():
        raise UserError(f"there is no checkpoint {str(path)!a}")
    saved, digest = read_saved(path)
    config, state = check_saved(saved, path), saved["state"]
    return Best(
        # A plain dict: one of torch's may have metadata, which a model would act on.
        weights=dict(state["model"] if state["ema"] is None else state["ema"]),
        config=config,
        step=state["step"],
        classes=tuple(saved["classes"]),
        mean=tuple(saved["mean"]),
        std=tuple(saved["std"]),
        digest=digest,
    )


def misfit(path: Path, error: Exception) -> str:
    """What to say when a checkpoint's weights don't fit the model: the first of torch's reasons."""
    reasons = [line.strip() for line in str(error).splitlines()]
    return f"{str(path)!a} holds another model: {reasons[1] if len(reasons) > 1 else reasons[0]}"
