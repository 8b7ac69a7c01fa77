"""Search for better values of knobs on Ray Tune: trials are ordinary runs, in a folder each.

What a trial tries is written before it starts. So a killed search goes on: it proposes the same
again, reports the evaluations that are there, and trains only what is missing.
"""

import json
import logging
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import torch
from ray import tune
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher

from ...config import FREE_TO_CHANGE, Config
from ...errors import UserError, choose
from ...runtime.config_dict import sections
from ...runtime.console import say
from ...runtime.files import lock_file, read_object, write_json, write_text
from ...runtime.signals import TIME_LIMIT, StoppedError
from ..ray_train.cluster import start_ray
from .command import SearchOptions
from .engines import GOAL, Knobs, Listed, build_engine, check_space, text_of
from .job import Job, build_scheduler, plan
from .overview import page_of
from .proposals import Proposals
from .results import (
    Trial,
    best_of,
    compute_text,
    confirmed,
    read_record,
    read_trials,
    recorded_knobs,
    table_of,
    trial_folder,
)
from .spaces import SPACES, Space
from .trial import RunTrial

OBJECT_STORE_BYTES = 100 * 2**20  # nearly the least: trials exchange files, no objects


def search(preset: str, options: SearchOptions, changed: Knobs) -> None:
    """Search, print a table, and write `results.json` and `search.html` to the search folder.

    Args:
        preset: its name.
        options: of the command.
        changed: knobs in which all trials differ from the preset.

    Raises:
        UserError: if the space, the engine, the machine or the folder cannot be used.
        FaultError: if no trial was evaluated, or the time limit ended runs.
    """
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    config = Config(**sections(options))
    folder = Path(options.run.dir).absolute()
    space_name = options.space or (preset if preset in SPACES else "default")
    space = choose("search space", space_name, SPACES)(config)
    check_space(space, config)
    job = plan(preset, options, changed)
    recorded = [] if options.run.fresh else recorded_knobs(folder)
    engine = build_engine(options.search, space, recorded, options.trials, options.seed)
    scheduler = build_scheduler(options, config.epochs / job.unit)
    knobs = (
        {knob: text_of(domain) for knob, domain in space.items()} if isinstance(space, dict) else {}
    )
    fixed = {knob: v for knob, v in changed.items() if not knob.startswith(FREE_TO_CHANGE)}
    about = {"preset": preset, "changed": fixed, "space": space_name, "knobs": knobs}
    with own_folder(folder, about, options.run.fresh), cluster(job):
        say(
            f"{options.trials} trials of {preset}, {job.at_once} at once: {options.search}, "
            f"{options.scheduler}; space {space_name}"
        )
        say("\n".join(f"  {knob}: {text}" for knob, text in knobs.items()))
        if recorded:
            say(f"resumes with the {len(recorded)} trials that were begun")
        run_trials(job, engine, scheduler, folder, options.trials)
        best = report(folder, job, space)
        if not options.confirm:
            say(f"The best of {options.trials} may be luck: add --confirm 5 to this command.")
            return
        seeds = range(options.seed + 1, options.seed + 1 + options.confirm)
        for name, own in (("preset", {}), ("best", best.knobs)):
            runs = Listed([own | {"seed": seed} for seed in seeds])
            run_trials(job, runs, FIFOScheduler(), folder / "confirm" / name, options.confirm)
        say(confirmed(folder / "confirm"))


def report(folder: Path, job: Job, space: Space) -> Trial:
    """Print the trials and the best one's command, and write them and their page; the best one.

    Raises:
        FaultError: if no trial was evaluated.
    """
    trials = read_trials(folder)
    best = best_of(trials)
    table = table_of(trials)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
    lines += [f"{trial.number:03} failed: {trial.failed}" for trial in trials if trial.failed]
    compute = compute_text(trials, job.config.epochs)
    command = shlex.join(["python", "train.py", *job.words(best.knobs)])
    write_json(
        folder / "results.json",
        {"best": best.number, "command": command, "trials": [vars(trial) for trial in trials]},
    )
    about = f"{len(trials)} trials of {job.preset}; {compute}"
    page = page_of(f"Search: {job.preset}", about, trials, best, space, command)
    write_text(folder / "search.html", page)
    say("\n".join(["", *lines, compute, f"written: {folder}/search.html and results.json"]))
    say(f"best: trial {best.number:03}: {command}")
    return best


def run_trials(
    job: Job, engine: Searcher, scheduler: TrialScheduler, folder: Path, trials: int
) -> None:
    """Run trials until `trials` have ended; each in a folder in `folder`.

    Raises:
        StoppedError: if the time limit ended runs; all saved.
    """
    storage = folder / "ray"  # of this start alone
    shutil.rmtree(storage, ignore_errors=True)
    tune.Tuner(
        tune.with_resources(RunTrial, {"cpu": job.cpus, "gpu": job.gpus}),
        tune_config=tune.TuneConfig(
            num_samples=trials,
            search_alg=Proposals(engine, job, folder),
            scheduler=scheduler,
            reuse_actors=True,
            **GOAL,
        ),
        run_config=tune.RunConfig(storage_path=str(storage), name="tune", verbose=0),
    ).fit()
    shutil.rmtree(storage, ignore_errors=True)
    saved = sum("saved" in read_record(trial_folder(folder, n)) for n in range(trials))
    if saved:
        account = f"{trials - saved} of {trials} trials in {folder} have ended, the others saved"
        raise StoppedError(TIME_LIMIT, f"{account}; run the same command to resume")


@contextmanager
def cluster(job: Job) -> Iterator[None]:
    """A block with a Ray cluster on this machine, of the trials' size.

    Raises:
        FaultError: if Ray does not start.
    """
    start_ray(
        job.at_once * job.cpus,
        num_gpus=torch.cuda.device_count() if job.gpus else 0,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level=logging.CRITICAL,
    )
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def own_folder(folder: Path, about: dict[str, Any], fresh: bool) -> Iterator[None]:
    """A block in which the search folder exists and is locked.

    Raises:
        UserError: if it can't be written, is in use, or holds a search for something else.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("a+")
    except OSError as error:
        raise UserError(
            f"cannot write to the search folder {str(folder)!a}: {error.strerror}"
        ) from error
    with lock:
        lock_file(lock, f"another search is at work in {str(folder)!a}")
        path = folder / "search.json"
        if fresh:
            for old in [*folder.glob("[0-9][0-9][0-9]*"), folder / "confirm"]:
                shutil.rmtree(old, ignore_errors=True)
        elif path.exists() and read_object(path) != json.loads(json.dumps(about)):
            raise UserError(
                f"{str(folder)!a} holds a search with another preset, space or config: set another "
                "--run.dir, or --run.fresh to delete it"
            )
        write_json(path, about)
        yield
