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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from ray import tune
from ray.tune.schedulers import (
    FIFOScheduler,
    HyperBandForBOHB,
    HyperBandScheduler,
    TrialScheduler,
)
from ray.tune.search import Searcher

from ...config import Config
from ...errors import UserError, choose
from ...runtime.config_dict import words_of
from ...runtime.console import say
from ...runtime.files import lock_file, read_object, write_json, write_text
from ...runtime.machine import num_cores
from ..ray_cluster import start_ray
from ..recipe_options import sections
from .command import SearchOptions
from .engines import GOAL, Knobs, Listed, build_engine, check_space, text_of, tidy
from .halving import PausingASHA
from .overview import page_of
from .results import (
    Trial,
    best_of,
    compute_text,
    confirmed,
    num_images,
    read_record,
    read_trials,
    recorded_knobs,
    table_of,
    trial_folder,
)
from .spaces import SPACES, Space
from .trial import RunTrial, evaluations

BOHB_NOTE = "bohb: nobody maintains hpbandster any more; --search tpe --scheduler asha is kept up"

OBJECT_STORE_BYTES = 100 * 2**20  # nearly the least: trials exchange files, no objects


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
        }


def search(preset: str, options: SearchOptions, changed: Knobs) -> None:
    """Search, print a table, and write `results.json` and `search.html` to the search folder.

    Args:
        preset: its name.
        options: of the command.
        changed: knobs in which all trials differ from the preset.

    Raises:
        UserError: if the space, the engine, the machine or the folder cannot be used.
        FaultError: if no trial was evaluated.
    """
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    config, folder = Config(**sections(options)), Path(options.run.dir).absolute()
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
    about = {"preset": preset, "changed": changed, "space": space_name, "knobs": knobs}
    with own_folder(folder, about, options.run.fresh), cluster(job):
        say(
            f"{options.trials} trials of {preset}, {job.at_once} at once: {options.search}, "
            f"{options.scheduler}; space {space_name}"
        )
        say("\n".join(f"  {knob}: {text}" for knob, text in knobs.items()))
        if options.search == "bohb":
            say(BOHB_NOTE)
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
        images = num_images(trial_folder(folder, best.number))
        say(confirmed(folder / "confirm", images))


def report(folder: Path, job: Job, space: Space) -> Trial:
    """Print the trials and the best one's command, and write them and their page; the best one.

    Raises:
        FaultError: if no trial was evaluated.
    """
    trials = read_trials(folder)
    best, table = best_of(trials), table_of(trials)
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
    kind = HyperBandForBOHB if options.search == "bohb" else HyperBandScheduler
    return kind("units", max_t=max(1, round(units)), reduction_factor=options.reduction)


class Proposals(Searcher):
    """What an engine proposes, with the folder of each trial, in which it is recorded."""

    def __init__(self, engine: Searcher, job: Job, folder: Path, most: int) -> None:
        """Let `most` trials run at once; 0 leaves that to Ray, where paused ones are not told."""
        super().__init__(**GOAL)
        self.engine, self.job, self.folder, self.most = engine, job, folder, most
        self.folders: dict[str, Path] = {}  # of each trial, in the order of the proposals
        self.known: dict[str, int] = {}  # evaluations of each trial that were there before
        self.running: set[str] = set()
        self.completed: set[str] = set()  # trials as the engine has it

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """The next trial; None: not yet."""
        if self.most and len(self.running) >= self.most:
            return None
        knobs = self.engine.suggest(trial_id)
        if not isinstance(knobs, dict):
            return knobs
        knobs = {knob: tidy(value) for knob, value in knobs.items()}
        self.running.add(trial_id)
        folder = self.folders[trial_id] = trial_folder(self.folder, len(self.folders))
        self.known[trial_id] = len(evaluations(folder))
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "trial.json", {"knobs": knobs})
        return self.job.trial(folder, knobs)

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Print an evaluation, and pass it to the engine.

        To the engine a trial ends at its first pause: TPE is to compare trials at the same place.
        """
        is_paused = trial_id not in self.running
        self.tell(trial_id, result, ", paused" if is_paused else "")
        if is_paused and not self.is_bohb:
            self.complete(trial_id, result=result)
        elif trial_id not in self.completed:
            self.engine.on_trial_result(trial_id, result)

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Print how a trial ended, and pass that to the engine."""
        self.running.discard(trial_id)
        self.complete(trial_id, result=result, error=error)
        if error:
            failed = read_record(self.folders[trial_id]).get("failed", "Ray ended it")
            say(f"{self.name(trial_id)}  failed: {failed}")
        elif result:
            self.tell(trial_id, result, ", done" if result["is_run_done"] else ", stopped")

    def complete(self, trial_id: str, **outcome: Any) -> None:  # noqa: ANN401
        """Tell the engine once that a trial is complete."""
        if trial_id not in self.completed:
            self.completed.add(trial_id)
            self.engine.on_trial_complete(trial_id, **outcome)

    def tell(self, trial_id: str, result: dict[str, Any], end: str) -> None:
        """Print an evaluation, unless an earlier search did."""
        if result["evaluations"] > self.known[trial_id]:
            top1 = f"top-1 {result['top1']:.2%}"
            say(f"{self.name(trial_id)}  epoch {result['epoch']:5.2f}  {top1}{end}")

    def name(self, trial_id: str) -> str:
        """How a line names a trial."""
        return str(self.folders[trial_id].relative_to(self.folder.parent))

    @property
    def is_bohb(self) -> bool:
        """Whether the engine learns from each rung, as its scheduler tells it."""
        return hasattr(self.engine, "on_pause")

    def on_pause(self, trial_id: str) -> None:
        """Note that a trial does not run, as schedulers say that pause some."""
        self.running.discard(trial_id)
        if self.is_bohb:
            self.engine.on_pause(trial_id)

    def on_unpause(self, trial_id: str) -> None:
        """Note that a trial runs again."""
        self.running.add(trial_id)
        if self.is_bohb:
            self.engine.on_unpause(trial_id)

    def save(self, checkpoint_path: str) -> None:
        """Leave it at the records of the trials."""


def run_trials(
    job: Job, engine: Searcher, scheduler: TrialScheduler, folder: Path, trials: int
) -> None:
    """Run trials until `trials` have ended; each in a folder in `folder`."""
    most = 0 if isinstance(scheduler, HyperBandScheduler) else job.at_once
    storage = folder / "ray"  # of this start alone
    shutil.rmtree(storage, ignore_errors=True)
    tune.Tuner(
        tune.with_resources(RunTrial, {"cpu": job.cpus, "gpu": job.gpus}),
        tune_config=tune.TuneConfig(
            num_samples=trials,
            search_alg=Proposals(engine, job, folder, most),
            scheduler=scheduler,
            reuse_actors=True,
            **GOAL,
        ),
        run_config=tune.RunConfig(storage_path=str(storage), name="tune", verbose=0),
    ).fit()
    shutil.rmtree(storage, ignore_errors=True)


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
