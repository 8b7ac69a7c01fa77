"""What a search does: its recipe, its trials' shares of the machine, its scheduler."""

import os
from dataclasses import dataclass, replace

import numpy as np
import torch
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, TrialScheduler

from ...config import Config
from ...errors import UserError
from ...runtime.config_dict import sections
from ...runtime.machine import num_cores
from ...tasks import metric_of
from ..runs.recipe import Recipe
from .command import SearchOptions
from .engines import Knobs


@dataclass(frozen=True)
class Job:
    """What the trials of a search share."""

    recipe: Recipe  # preset and config; its folder is that of the search
    options: SearchOptions  # with numbers for `auto`
    metric: str  # that decides
    every: float  # epochs between evaluations


def plan(preset: str, options: SearchOptions, changed: Knobs) -> Job:
    """How trials share the machine, and how often they are evaluated.

    Raises:
        UserError: if a trial asks for more than there is, or options contradict each other.
    """
    if options.min_epochs > options.epochs:
        raise UserError(
            f"--min-epochs {options.min_epochs:g} is more than --epochs {options.epochs:g}"
        )
    if options.epochs == 0:
        raise UserError("--epochs 0 trains no step that a search could judge: --epochs 1 or more")
    devices = torch.cuda.device_count() if options.compute.device in ("auto", "cuda") else 0
    cores = num_cores()
    size = 1 if options.run.processes == "auto" else options.run.processes
    gpus = min(size, size * devices) if options.gpus == "auto" else options.gpus
    is_none = not gpus and options.compute.device == "cuda"
    is_other = gpus and options.run.processes not in ("auto", max(1, gpus))
    if is_none or is_other or gpus > devices or (gpus > 1 and gpus % 1):
        raise UserError(
            f"--gpus {gpus:g} of a trial: there are {devices}; a part, or one for each process"
        )
    own = 1 if options.cpus == "auto" else options.cpus
    if own > cores:
        raise UserError(f"--cpus {own} of a trial: there are {cores}")
    most = min(options.trials, cores // own, int(devices / gpus) if gpus else cores)
    at_once = most if options.max_concurrent == "auto" else options.max_concurrent
    min_epochs = options.min_epochs or options.epochs / options.reduction**2
    every = options.run.evaluate_every_epochs
    if options.scheduler != "none" and not options.run.patience:  # which counts evaluations
        every = min(every, min_epochs)
    run = {"dir": os.path.abspath(options.run.dir), "processes": max(size, int(gpus))}
    config = replace(Config(**sections(options)), run=replace(options.run, **run))
    if devices and not gpus:
        config = replace(config, compute=replace(config.compute, device="cpu"))
        changed = changed | {"compute.device": "cpu"}
    recipe = Recipe(preset, config, changed, at_once)
    cpus = max(1, cores // at_once) if options.cpus == "auto" else options.cpus
    options = replace(options, min_epochs=min_epochs, cpus=cpus, gpus=gpus)
    return Job(recipe, options, metric_of(config), every)


def build_scheduler(job: Job) -> TrialScheduler:
    """What ends trials early."""
    if job.options.scheduler == "none":
        return FIFOScheduler()
    np.random.seed(job.options.seed % 2**32)  # by which Ray puts trials in brackets
    return ASHAScheduler(
        "planned_epoch",
        max_t=job.options.epochs,
        grace_period=job.options.min_epochs,
        reduction_factor=job.options.reduction,
        brackets=3 if job.options.scheduler == "hyperband" else 1,
    )
