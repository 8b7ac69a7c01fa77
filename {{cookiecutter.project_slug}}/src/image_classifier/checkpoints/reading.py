"""Checkpoints and weights, read from files without running anything that may be in them."""

import hashlib
import os
import re
import warnings
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ..config import Config
from ..errors import UserError
from ..extensions import chained
from ..metrics import Decision, read_decision
from ..runtime.config_dict import of_others, unflatten, words_of
from ..runtime.files import open_plain

Colors = tuple[float, ...]  # of each channel, from 0 to 1

# What Python and torch raise where a file does not hold what `Checkpoints.save` writes.
WRONG_CONTENT = (LookupError, TypeError, ValueError, AttributeError, RuntimeError)
# The types of what a checkpoint holds; those of its weights are checked one by one.
STATE = {"step": int, "best_score": float, "best_step": int, "num_worse": int}
STATE |= {"model": dict, "optimizer": dict, "scaler": dict}
KINDS = {"state": STATE, "report": {"loss": float, "step": int}, "config": dict, "files": dict}
KINDS |= {"fingerprint": str, "classes": list, "mean": list, "std": list}


class DamagedError(UserError):
    """A file that is not what was written."""


@dataclass(frozen=True)
class Best:
    """A trained model as its checkpoint has it: the weights, and what is needed to use them."""

    path: Path  # of the checkpoint
    digest: str  # of that file
    weights: dict[str, Tensor] = field(repr=False)  # those that were evaluated: the averaged ones
    # where there are any
    config: Config
    step: int
    classes: tuple[str, ...]
    mean: Colors  # that training images were normalized by
    std: Colors
    decision: Decision  # on the validation images
    fingerprint: str  # of the training images

    @property
    def origin(self) -> str:
        """Which weights of the run they are, in words."""
        if self.step:
            return f"of step {self.step}"
        return "from before training" if self.config.epochs else "of a linear probe"

    @property
    def bits(self) -> int:
        """Of each number of an image."""
        return self.config.data.bits


def load_best(path: Path) -> Best:
    """The weights of a checkpoint with all that is needed to use them.

    Raises:
        UserError: if there is no such file, or it can't be used.
    """
    if not path.is_file():
        raise UserError(f"there is no checkpoint {str(path)!a}")
    saved, digest = read_file(path)
    return parse_checkpoint(saved, path, digest)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """All that `Checkpoints.save` wrote: tensors in host memory and plain values.

    Raises:
        DamagedError: if the file is not what was written.
        UserError: if it holds anything but what is written there.
    """
    saved, digest = read_file(path)
    parse_checkpoint(saved, path, digest)
    return saved


def newest_first(folder: Path) -> list[Path]:
    """The checkpoints of a run in the order in which to try them; one of them may be damaged.

    There are none before `last.pt`: the first save was not completed, and its best may be missing.
    A folder of sharded weights gets its name after `best.pt`, and is not `last.pt`.
    """
    last = folder / "last.pt"
    steps = saved_steps(folder)[::-1]
    if steps and steps[0].is_dir():
        return steps
    return [last, *steps] if last.exists() else []


def saved_steps(folder: Path) -> list[Path]:
    """The checkpoints of single steps, oldest first: files, or folders of sharded weights."""
    return sorted(path for path in folder.glob("step_*") if path.suffix in ("", ".pt"))


def parse_checkpoint(saved: Any, path: Path, digest: str) -> Best:  # noqa: ANN401 - any file's
    """What was read from `path` as a trained model.

    Raises:
        UserError: if it is something else, or of another version of this project.
    """
    try:
        if "best_top1" in saved["state"]:  # as it was called when nothing else could decide
            saved["state"]["best_score"] = saved["state"].pop("best_top1")
        check_kinds(saved, KINDS)
        state = saved["state"]
        classes = tuple(saved["classes"])
        mean, std = check_images(classes, saved["mean"], saved["std"])
        if state["step"] < 0:
            raise ValueError(f"step is {state['step']}")
        # Plain dicts: one of torch's may have metadata, which a model would act on.
        weights = dict(state["model"] if state["ema"] is None else state["ema"])
        check_weights(state["model"])
        check_weights(weights)
        decision = read_decision(state)
        weights = chained("network", "plain_weights", weights, saved["config"])
    except WRONG_CONTENT as error:
        raise UserError(f"{str(path)!a} is not a checkpoint of this project: {error!r}") from error
    try:
        others = of_others(saved["config"])  # of training, but for those of the network
        if reason := needs_tool(others, "model."):
            raise UserError(reason)
        config = unflatten({k: v for k, v in saved["config"].items() if k not in others})
    except (*WRONG_CONTENT, UserError) as error:  # such as an unknown knob
        raise UserError(f"{str(path)!a} is of another version of this project: {error}") from error
    if len(mean) != config.data.channels:
        raise UserError(
            f"{str(path)!a} is not a checkpoint of this project: it has a mean of {len(mean)} "
            f"channels, for images of {config.data.channels}"
        )
    found = classes, mean, std, decision, saved["fingerprint"]
    return Best(path, digest, weights, config, state["step"], *found)


def needs_tool(knobs: dict[str, Any], *sections: str) -> str:
    """Why knobs of these sections, which this project has not, can't be ignored; or nothing."""
    found = {knob: value for knob, value in knobs.items() if knob.startswith(sections)}
    words = " ".join(words_of(found))
    return f"it was trained with {words}, of a tool that is not here" if found else ""


def check_kinds(values: dict[str, Any], kinds: dict[str, Any]) -> None:
    """Raise KeyError or TypeError unless `values` has all of `kinds`, which may be nested."""
    for name, kind in kinds.items():
        if isinstance(kind, dict):
            check_kinds(values[name], kind)
        elif not isinstance(values[name], kind) or isinstance(values[name], bool):
            raise TypeError(f"{name} is {values[name]!r:.40}, not of type {kind.__name__}")


def check_images(classes: tuple, mean: list[float], std: list[float]) -> tuple[Colors, Colors]:
    """`mean` and `std`, once they and the classes are such as a run saves.

    Raises:
        TypeError, ValueError: if they are not.
    """
    if not classes or not all(isinstance(name, str) for name in classes):
        raise ValueError("its classes are not names")
    is_possible = all(0 <= m <= 1 for m in mean) and all(0 < s <= 1 for s in std)
    if not mean or len(mean) != len(std) or not is_possible:
        raise ValueError(f"no images have the mean {mean} and the std {std}")
    return tuple(mean), tuple(std)


def check_weights(weights: dict[str, Tensor]) -> None:
    """Raise ValueError, naming the first that is wrong, unless all are dense tensors on the CPU."""
    if not weights:
        raise ValueError("there are no weights")
    for name, weight in weights.items():
        is_plain = isinstance(name, str) and isinstance(weight, Tensor)
        is_dense = is_plain and weight.layout == torch.strided and not weight.is_quantized
        if not is_dense or weight.device.type != "cpu":
            raise ValueError(f"{name!a} is not a dense tensor")


def read_file(path: Path, needs_archive: bool = True) -> tuple[Any, str]:
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
            file.seek(0)
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
            # What would unpack to more than the file is a bomb; TorchScript is compressed, too.
            is_bomb = sum(record.file_size for record in records) >= os.fstat(file.fileno()).st_size
            is_bomb |= any(record.compress_type != zipfile.ZIP_STORED for record in records)
            wrong = None if is_bomb else archive.testzip()
    # A hostile archive raises more than BadZipFile: of unknown compression, of a password.
    except (zipfile.BadZipFile, OSError, EOFError, RuntimeError, ValueError) as error:
        raise DamagedError(f"{str(path)!a} is damaged: {error}") from error
    if is_bomb:
        raise DamagedError(f"{str(path)!a} is damaged: it is compressed, as no checkpoint is")
    if wrong:
        raise DamagedError(f"{str(path)!a} is damaged: wrong checksum of {wrong!a}")


def load_plain(file: BinaryIO, path: Path) -> Any:  # noqa: ANN401 - whatever a file may hold
    """Tensors in host memory and plain values from a file; the one place that reads them."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of tensors that are refused soon after
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        # Not torch's own words, which advise to load it all the same.
        name = re.search(r"GLOBAL (\S+)", str(error))
        reason = "it holds objects other than tensors and plain values"
        reason = f"{reason} ({ascii(name[1])[1:-1]})" if name else f"it is damaged, or {reason[3:]}"
        raise UserError(f"refusing to load {str(path)!a}: {reason}") from error


def first_reason(error: Exception) -> str:
    """The first of the reasons for which torch can't load weights, which it lists in lines."""
    return "".join(str(error).splitlines()[:2][-1:]).strip()
