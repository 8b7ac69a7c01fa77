"""What the package offers to programs: `from <package> import load`.

PyTorch is imported when one of them is called.
"""

import gc
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...config import Config
from ...errors import UserError
from ...runtime.command_line import parse, take_preset
from ...runtime.config_dict import words_of
from ...runtime.launch import BEGAN

if TYPE_CHECKING:
    from ...evaluate import Scores
    from .classifier import Classifier


def load(
    run: str | os.PathLike[str], *more: str | os.PathLike[str], device: str = "auto"
) -> "Classifier":
    """The trained model of a run, or of several as one: `load("runs/a").predict("photo.jpg")`.

    Args:
        run: a run folder, or a checkpoint in one.
        more: others, whose mean probabilities are the model's; they need the tool `ensemble`.
        device: `cpu`, `cuda`, `cuda:1` or `mps`; `auto`: an accelerator if there is one. A GPU is
            torch's current one from then on.

    Raises:
        UserError: if there is no such run or device, or the runs do not fit together.
    """
    from .classifier import load_runs

    return load_runs([os.fspath(one) for one in (run, *more)], device)


def configure(preset: str = "shapes", options: Mapping[str, Any] | None = None) -> Config:
    """The config of a preset with other options: `configure("folder", {"data.root": "photos"})`.

    The names are those of the command line, which `python train.py PRESET --help` explains.

    Raises:
        UserError: if there is no such preset or option, or it can't have that value.
    """
    knobs = dict(options or {})
    if odd := [name for name, value in knobs.items() if name in ("h", "help") or value is None]:
        raise UserError(f"{odd[0]!a} is no option, or has no value")
    words = [preset, *words_of(knobs)]
    _, config = take_preset(words, preset, "runs/{}")
    return parse(Config, words, prog="configure", about="", default=config)


def fit(config: Config) -> "Scores":
    """Train in this process, on one device, as `config` says; it prints what `train.py` prints.

    A run that was interrupted resumes from its last checkpoint. The first interrupt (Ctrl-C, or the
    button of a notebook) saves and raises `StoppedError`, a second one at once ends the process.

    Returns:
        The validation scores of the best weights, which `load(config.run.dir)` has.

    Raises:
        UserError: if the config, the data or the run folder cannot be used.
        FaultError: if the run stopped early; what was saved is kept.
    """
    import torch

    from ...runtime.out_of_memory import OutOfMemoryError
    from ...train import train

    os.environ[BEGAN] = str(time.monotonic())  # a time limit is of the last call
    while True:
        try:
            return train(config)
        except OutOfMemoryError as error:
            print(error, flush=True)
        finally:
            gc.collect()  # the run may be in reference cycles, with all that it holds
            torch.cuda.empty_cache()  # does nothing if no GPU is in use
        config = replace(config, run=replace(config.run, fresh=False))
