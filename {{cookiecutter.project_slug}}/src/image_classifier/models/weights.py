"""What checkpoints hold, read without running anything that may be in them."""

import hashlib
import os
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ..config import Config, UserError, unflatten
from ..data import Source
from ..runtime.files import open_plain

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool)
DTYPES += (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class DamagedError(Exception):
    """A file that is not a whole checkpoint."""


# What is wrong with a value, behind the place in it, such as `.step is -7, not ...`; or nothing.
Form = Callable[[Any], str]


def single(name: str, fits: Callable[[Any], bool]) -> Form:
    """A single value."""
    return lambda value: "" if fits(value) else f" is {describe(value)}, not {name}"


def number(low: float, high: float) -> Form:
    """A number from `low` to `high`, and so not nan."""
    name = f"a number from {low:g} to {high:g}"
    return single(name, lambda value: type(value) in (int, float) and low <= value <= high)


def whole(low: int, high: int) -> Form:
    """A whole number from `low` to `high`."""
    name = f"a whole number from {low:g} to {high:g}"
    return single(name, lambda value: type(value) is int and low <= value <= high)


def maybe(form: Form, nothing: object = None) -> Form:
    """What has a form, or `nothing`."""
    kind = type(nothing)
    return lambda value: "" if type(value) is kind and value == nothing else form(value)


def row(form: Form, count: int | None = None) -> Form:
    """A list of values of one form, of any length or of `count`."""

    def reason(value: Any) -> str:  # noqa: ANN401 - whatever a file may hold
        if type(value) not in (list, tuple) or count not in (None, len(value)):
            return f" is {describe(value)}, not a list{f' of {count}' if count else ''}"
        return first((place, form(one)) for place, one in enumerate(value))

    return reason


def each(key: type, form: Form) -> Form:
    """A dict of any length, all of whose keys are of one type and values of one form."""

    def reason(value: Any) -> str:  # noqa: ANN401 - whatever a file may hold
        if not isinstance(value, dict) or any(type(name) is not key for name in value):
            return f" is {describe(value)}, not a dict by {key.__name__}"
        return first((name, form(one)) for name, one in value.items())

    return reason


def record(forms: dict[str, Form]) -> Form:
    """A dict with values by name. One with a ? may be missing, and others may be there."""
    known = {name.removesuffix("?"): form for name, form in forms.items()}

    def reason(value: Any) -> str:  # noqa: ANN401 - whatever a file may hold
        if not isinstance(value, dict):
            return f" is {describe(value)}, not a dict"
        if missing := [name for name in needed_in(forms) if name not in value]:
            return f" has no {missing[0]}"
        return first((name, known[name](value[name])) for name in known if name in value)

    return reason


def needed_in(forms: dict[str, Form]) -> list[str]:
    """The names that must be in a `record` of these forms."""
    return [name for name in forms if not name.endswith("?")]


def first(reasons: Iterator[tuple[Any, str]]) -> str:
    """The first reason that is one, and the name of the part that it is about."""
    return next((f".{str(name)[:80]}{reason}" for name, reason in reasons if reason), "")


def describe(value: Any) -> str:  # noqa: ANN401 - whatever a file may hold
    """A value if it is short, or what it is."""
    if isinstance(value, Tensor):
        return f"a tensor ({value.layout}, {value.dtype}, {value.device})"
    if isinstance(value, str):
        return ascii(value[:40])
    is_short = isinstance(value, float | None) or (isinstance(value, int) and abs(value) < 2**64)
    return str(value) if is_short else f"a {type(value).__name__}"


def is_dense(value: Any) -> bool:  # noqa: ANN401 - whatever a file may hold
    """Whether a value is a tensor as models have them: in host memory, and not quantised."""
    return (
        type(value) is Tensor
        and value.device.type == "cpu"
        and value.layout == torch.strided
        and value.dtype in DTYPES
        and not value.is_nested
    )


def is_plain(value: Any) -> bool:  # noqa: ANN401 - whatever a file may hold
    """Whether a value may be one of a knob."""
    if type(value) in (list, tuple):
        return all(type(one) is str for one in value)
    return type(value) in (str, bool, float) or (type(value) is int and abs(value) < 2**63)


COUNT = whole(0, 2**53)  # a float holds each number up to here
TEXT = single("text", lambda value: type(value) is str)
FLOAT = single("a number", lambda value: type(value) is float)
DENSE = single("a dense tensor", is_dense)
WEIGHTS = each(str, DENSE)
# What `Checkpoints.save` writes.
PARTS = {
    "state": record(
        {
            "step": COUNT,
            "best_top1": number(-1, 1),
            "best_step": whole(-1, 2**53),
            "num_worse?": COUNT,
            "model": WEIGHTS,
            "ema": maybe(WEIGHTS),
            "optimizer": record(
                {
                    "state": each(int, each(str, maybe(DENSE))),
                    "param_groups": row(record({"params": row(COUNT)})),
                }
            ),
            "scaler": maybe(
                record(
                    {
                        "scale": number(1e-38, 1e38),
                        "growth_factor": number(1, 2**16),
                        "backoff_factor": number(2**-16, 1),
                        "growth_interval": whole(1, 2**31 - 1),
                        "_growth_tracker": whole(0, 2**31 - 1),
                    }
                ),
                nothing={},
            ),
        }
    ),
    "config": each(str, single("the value of a knob", is_plain)),
    "classes": row(TEXT),
    "fingerprint": TEXT,
    "files?": each(str, TEXT),
    "mean": row(number(-1e6, 1e6), 3),
    "std": row(number(1e-6, 1e6), 3),
    "report": record({"loss": FLOAT, "step": COUNT, "joules?": number(0, 1e38)}),
}
CHECKPOINT = record(PARTS)


def contradiction(saved: dict[str, Any]) -> str:
    """What parts that have their forms can't be together; nothing if all is well."""
    state, report = saved["state"], saved["report"]
    model, ema = state["model"], state["ema"]
    if not saved["classes"] or not model:
        return "there are no classes, or no weights"
    shapes, ema_shapes = ({n: w.shape for n, w in (part or {}).items()} for part in (model, ema))
    if ema is not None and shapes != ema_shapes:
        return "state.ema is not of the same model as state.model"
    if (ema is None) == bool(saved["config"].get("optim.ema_decay")):
        return "state.ema is there, or is not, other than optim.ema_decay says"
    if max(state["best_step"], report["step"]) > state["step"]:
        return f"it is of step {state['step']}, and has what was later"
    return ""


def check_saved(saved: Any, path: Path) -> Config:  # noqa: ANN401 - whatever a file may hold
    """Refuse what is not as `Checkpoints.save` writes it; the config that it has.

    Raises:
        UserError: that says what is wrong, and where in it.
    """
    if reason := CHECKPOINT(saved) or contradiction(saved):
        reason = reason.removeprefix(".").strip()
        raise UserError(f"{str(path)!a} is not a checkpoint of this project: {reason}")
    try:
        return unflatten(saved["config"])
    except (TypeError, UserError) as error:  # such as an unknown knob
        raise UserError(f"{str(path)!a} is of another version of this project: {error}") from error


@contextmanager
def open_saved(path: Path) -> Iterator[BinaryIO]:
    """A block with a file of torch's, from which all is read that is to be known of it.

    Its name may meanwhile become that of another.

    Raises:
        DamagedError: if it can't be opened.
    """
    try:
        file = open_plain(path)
    except OSError as error:
        raise DamagedError(f"{str(path)!a} is damaged: {error.strerror}") from error
    with file:
        yield file


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What was saved, as tensors in host memory and plain values.

    Raises:
        DamagedError: if the file is not what was written.
        UserError: if it holds anything but what is written there.
    """
    with open_saved(path) as file:
        check_archive(file, path)
        saved = load_plain(file, path)
    check_saved(saved, path)
    return saved


def check_archive(file: BinaryIO, path: Path) -> None:
    """Look at the checksums of what torch has saved, and at its sizes: `torch.load` does not.

    Raises:
        DamagedError: if the file is not what was written.
        UserError: if it is a program.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
            # We compress nothing: what would unpack to more than the file is a bomb.
            size = os.fstat(file.fileno()).st_size
            is_bomb = sum(record.file_size for record in records) >= size or any(
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


def load_plain(file: BinaryIO, path: Path) -> Any:  # noqa: ANN401 - whatever a file may hold
    """Tensors in host memory and plain values from a file; the one place that reads them.

    Raises:
        UserError: if it holds anything else.
    """
    file.seek(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of tensors that are refused soon after
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        # Not torch's own words, which advise to load it all the same.
        name = re.search(r"GLOBAL (\S+)", str(error))
        found = f" ({ascii(name[1])[1:-1]})" if name else ""
        raise UserError(
            f"refusing to load {str(path)!a}: "
            f"it holds objects other than tensors and plain values{found}"
        ) from error


def is_checkpoint(saved: Any) -> bool:  # noqa: ANN401 - whatever a file may hold
    """Whether `saved` has the parts of a checkpoint of this project, sound or not."""
    return isinstance(saved, dict) and saved.keys() >= {*needed_in(PARTS)}


@dataclass(frozen=True)
class Best:
    """What is needed to use a trained model."""

    weights: dict[str, Tensor]  # that were evaluated: the averaged ones where there are any
    config: Config
    step: int
    images: Source  # that it learned from: their classes, mean and deviation, and no pixels
    digest: str = ""  # of the file


def load_best(path: Path) -> Best:
    """The weights of a checkpoint with all that is needed to use them.

    Raises:
        UserError: if there is no such file, or it can't be used.
    """
    if not path.is_file():
        raise UserError(f"there is no checkpoint {str(path)!a}")
    try:
        with open_saved(path) as file:
            check_archive(file, path)
            saved = load_plain(file, path)
            file.seek(0)
            digest = hashlib.file_digest(file, "blake2b").hexdigest()[:32]
    except DamagedError as error:
        raise UserError(str(error)) from error
    return best_in(saved, path, digest)


def best_in(saved: Any, path: Path, digest: str = "") -> Best:  # noqa: ANN401 - whatever a file may hold
    """What `load_best` is to find in a checkpoint.

    Raises:
        UserError: if it can't be used.
    """
    config = check_saved(saved, path)
    state = saved["state"]
    return Best(
        # A dict of torch's could have more to it, which a model would be told of.
        weights=dict(state["model"] if state["ema"] is None else state["ema"]),
        config=config,
        step=state["step"],
        images=Source(
            labels=torch.empty(0, dtype=torch.int64),
            classes=tuple(saved["classes"]),
            pixels=torch.empty((0, 1, 1, 3), dtype=torch.uint8),
            mean=tuple(saved["mean"]),
            std=tuple(saved["std"]),
        ),
        digest=digest,
    )


def misfit(path: Path, error: Exception) -> str:
    """What to say when a checkpoint's weights don't fit the model: the first of torch's reasons."""
    reasons = [line.strip() for line in str(error).splitlines()]
    return f"{str(path)!a} holds another model: {reasons[1] if len(reasons) > 1 else reasons[0]}"


def abbreviate(names: list[str], most: int = 3) -> str:
    """The first few names."""
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")
