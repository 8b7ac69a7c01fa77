"""What a search does: its trials' command lines, their shares of the machine, its scheduler."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ray.tune.schedulers import FIFOScheduler, HyperBandForBOHB, TrialScheduler

from ...config import Config
from ...errors import UserError
from ...runtime.config_dict import sections, words_of
from ...runtime.machine import num_cores
from ...tasks import metric_of
from .command import SearchOptions
from .engines import Knobs
from .halving import PausingASHA


@dataclass(frozen=True)
class Job:
    """What the trials of a search share."""

    preset: str  # its name
    changed: Knobs  # in which all trials differ from the preset
    config: Config
    every: float  # epochs between evaluations
    unit: float  # epochs in a unit of the scheduler's time
    at_once: int
    cpus: int  # of a trial
    gpus: float  # of a trial

    def words(self, knobs: Knobs) -> list[str]:
        """The command line that trains with these knobs."""
        return [self.preset, *words_of(self.changed | knobs)]

    def trial(self, folder: Path, knobs: Knobs) -> dict[str, Any]:
        """What `RunTrial` needs."""
        own = {"run.evaluate_every_epochs": self.every, "run.dir": str(folder)}
        return {
            "folder": str(folder),
            "words": self.words(knobs | own),
            "threads": self.cpus,
            "epochs": self.config.epochs,
            "every": self.every,
            "unit": self.unit,
            "metric": metric_of(self.config),
        }


def plan(preset: str, options: SearchOptions, changed: Knobs) -> Job:
    """How trials share the machine, and how often they are evaluated.

    Raises:
        UserError: if a trial asks for more than there is, or options contradict each other.
    """
    if options.min_epochs > options.epochs:
        raise UserError(
            f"--min-epochs {options.min_epochs:g} is more than --epochs {options.epochs:g}"
        )
    devices = torch.cuda.device_count() if options.compute.device in ("auto", "cuda") else 0
    cores = num_cores()
    gpus = min(1.0, devices) if options.gpus == "auto" else options.gpus
    if gpus > devices or (gpus > 1 and gpus % 1):
        raise UserError(
            f"--gpus {gpus:g} of a trial: there are {devices}; a part, or a whole number"
        )
    at_once = options.max_concurrent
    if at_once == "auto":
        at_once = min(options.trials, cores, int(devices / gpus) if gpus else cores)
    cpus = max(1, cores // at_once) if options.cpus == "auto" else options.cpus
    every = options.run.evaluate_every_epochs
    unit = options.min_epochs or options.epochs / options.reduction**2
    if options.scheduler != "none" and not options.run.patience:  # which counts evaluations
        every = min(every, unit)
    config = Config(**sections(options))
    return Job(preset, changed, config, every, unit, at_once, cpus, gpus)


def build_scheduler(options: SearchOptions, units: float) -> TrialScheduler:
    """What ends or pauses trials, of `units` of its time each."""
    if options.scheduler == "none":
        return FIFOScheduler()
    if options.scheduler == "asha":
        return PausingASHA(units, options.reduction)
    # Ray's for BOHB, and right without it: `HyperBandScheduler` trains all in full if fewer run at
    # once than its first bracket has, of which those that are done do not count.
    most = max(1, round(units))
    return HyperBandForBOHB("units", max_t=most, reduction_factor=options.reduction)
