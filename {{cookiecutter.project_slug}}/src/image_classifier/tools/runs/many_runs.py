"""Several runs of one recipe: as many at once as there are devices, resumed by the same command.

Each is an ordinary run in a folder of its own; a file beside that folder has what it prints.
"""

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from os import environ
from typing import Any

import torch

from ...checkpoints import read_newest
from ...config import Config, RunConfig
from ...errors import EXIT_DONE, EXIT_RESTART, EXIT_USAGE, FaultError, UserError
from ...extensions import flag, of_tools
from ...metrics import find_metric, metric_number, metric_title, scale
from ...runtime.config_dict import flatten
from ...runtime.console import say
from ...runtime.distributed import World
from ...runtime.files import read_object, write_json
from ...runtime.machine import CORES, num_cores, num_threads
from ...runtime.run_dir import open_run
from ...runtime.signals import TIME_LIMIT, Signals, StoppedError
from ...tasks import metric_of
from ..statistics.statistics import CONFIDENCE, Mean, mean_of
from .child_runs import POLL_SECONDS, end_run, last_line, start_run, wait_until_free
from .recipe import Recipe
from .saved_runs import (
    FIXED_KNOBS,
    OF_MACHINE,
    SCORES,
    Images,
    Run,
    are_same,
    columns,
    grain_of,
    images_of,
    read_run,
)

# Options of a run that do not act on what it finds.
WITHOUT_EFFECT = ("run.dir", "run.processes", "run.fresh", "run.log_every_steps", "run.trackers")
WITHOUT_EFFECT += ("run.max_minutes", "run.timeout_seconds")

Knobs = dict[str, Any]  # options by their dotted names
Place = dict[str, str]  # the environment variables that give a run its GPUs and its cores


def repeat(recipe: Recipe, count: int) -> None:
    """Train with `count` seeds, and print and write what the runs reach.

    Raises:
        UserError: if a run cannot be trained so, or one that is done had other images or weights.
        FaultError: if a run failed, or a signal ended this.
    """
    seeds = range(recipe.config.seed, recipe.config.seed + count)
    runs = train_all(recipe, {f"seed-{seed}": {"seed": seed} for seed in seeds})
    images = [images_of(recipe.config, split) for split in ("val", "train")]
    for run in (run for run in runs if run.predictions):  # a full disk keeps none
        check_run(run, recipe.config, *images)
    metric = runs[0].metric
    is_share = find_metric(metric).is_percent
    content = {"preset": recipe.preset, "runs": [{"seed": run.seed} | as_json(run) for run in runs]}
    lines = []
    for of, name in SCORES.items():
        found = mean_of([getattr(run, name) for run in runs], grain_of(runs), is_share=is_share)
        content[name.replace("score", metric)] = asdict(found)
        lines.append(f"{metric_title(metric)} of {of} {mean_text(found, f'{count} seeds', metric)}")
    write_json(recipe.folder / "results.json", content)
    print_table("seed", dict(zip(seeds, runs, strict=True)))
    print("\n".join(lines))


def check_run(run: Run, config: Config, val: Images, train: Images | None = None) -> None:
    """Raise `UserError` if a run, perhaps done before, began otherwise or had other images."""
    wanted = flatten(config)
    is_same = run.need_predictions().are_of(*val)
    is_same &= all(run.knobs.get(knob) == wanted.get(knob) for knob in FIXED_KNOBS)
    if train:
        saved = read_newest(RunConfig(dir=str(run.folder)), World(torch.device("cpu")))
        is_same &= saved is None or are_same((saved["fingerprint"], saved["files"]), train)
    if not is_same:
        flags = " or ".join(f"--{flag(knob)}" for knob in FIXED_KNOBS if knob in wanted)
        raise UserError(
            f"{str(run.folder)!a} was trained on other images or with another {flags}: start over "
            "with --run.fresh, or take another --run.dir"
        )


def train_all(recipe: Recipe, each: dict[str, Knobs]) -> list[Run]:
    """Train a run for each entry of `each`: by its name, the options that it alone has.

    Runs that are done are not trained again, and runs that were interrupted resume.

    Raises:
        UserError: if another command trains in the folder; and as soon as a run rejects its options
            or data: those that train save and end.
        FaultError: if a run failed, when all others are done.
        StoppedError: after a signal, or if the time limit ended runs; all saved.
    """
    runs = {name: read_run(recipe.folder / name) for name in each if is_done(recipe, name, each)}
    todo = {name: own for name, own in each.items() if name not in runs}
    for name, run in runs.items():
        say(f"{name}: {run}, done before")
    places = devices(recipe)[: len(todo)]
    if todo:
        count = f"{len(todo)} of {len(each)} runs, {len(places)} at once"
        say(f"to train: {count}; what they print is in {recipe.folder}/*.txt")
    failed = []
    with (
        open_run(recipe.config, World(torch.device("cpu"))),  # two commands would share their logs
        Signals() as signals,
        closing(train_in(places, recipe, todo, signals)) as ends,
    ):
        if todo:  # what it says may be of other runs; their command writes it again
            (recipe.folder / "results.json").unlink(missing_ok=True)
        for name, code in ends:
            if code == EXIT_DONE:
                runs[name] = read_run(recipe.folder / name)
                say(f"{name}: {runs[name]}, {len(runs)} of {len(each)}")
                continue
            reason = last_line(recipe.folder / f"{name}.txt")
            if code == EXIT_USAGE:
                raise UserError(f"{name}: {reason.removeprefix('error: ')}")
            how = f" failed ({signal.Signals(-code).name if code < 0 else f'exit code {code}'})"
            say(f"{name}{'' if code == EXIT_RESTART else how}: {reason}")
            failed += [name] * (code != EXIT_RESTART)
    if len(runs) == len(each):
        return [runs[name] for name in each]
    account = f"{len(runs)} of {len(each)} runs in {recipe.folder} are done"
    again = f"run the same command{', without --run.fresh,' * recipe.config.run.fresh}"
    if failed and not signals.number:
        raise FaultError(f"{account}, {', '.join(failed)} failed; {again} to retry")
    saved = f"{account}, the others saved; {again} to resume"
    raise StoppedError(signals.number or TIME_LIMIT, saved)


def train_in(
    places: list[Place], recipe: Recipe, todo: dict[str, Knobs], signals: Signals
) -> Iterator[tuple[str, int]]:
    """Train runs, each at the first of `places` that is free: the name and exit code of each.

    After a signal, or if it is closed before its end, those that train save and end.
    """
    waiting = [*todo]
    training: dict[str, tuple[subprocess.Popen, Place]] = {}
    try:
        while (waiting or training) and not signals.number:
            while waiting and places:
                name = waiting.pop(0)
                place = places.pop(0)
                output = recipe.folder / f"{name}.txt"
                wait_until_free(recipe.folder / name, recipe.config.run.timeout_seconds)
                training[name] = start_run(recipe.words(name, todo[name]), output, **place), place
            time.sleep(POLL_SECONDS)
            for name in [name for name, (run, _) in training.items() if run.poll() is not None]:
                process, place = training.pop(name)
                places.append(place)
                yield name, process.returncode
    finally:
        for process, _ in training.values():
            process.terminate()
        for process, _ in training.values():
            end_run(process, recipe.config.run.timeout_seconds)


def is_done(recipe: Recipe, name: str, each: dict[str, Knobs]) -> bool:
    """Whether a run has ended that had the same options."""
    try:
        status = read_object(recipe.folder / name / "status.json")
        was = of_tools() | read_object(recipe.folder / name / "config.json")
    except OSError:  # it has not begun
        return False
    # `check_run` refuses others of FIXED_KNOBS; `config.json` has what `best_by` became.
    free = {*OF_MACHINE, *WITHOUT_EFFECT, *FIXED_KNOBS, "run.best_by"}
    if recipe.config.precision != "auto":
        free.remove("precision")
    wanted = flatten(recipe.config) | each[name]
    same = (was.get(k) == v for k, v in wanted.items() if not k.startswith(tuple(free)))
    is_over = status.get("state") == "done" and not recipe.config.run.fresh
    return is_over and all(same) and metric_of(was) == metric_of(wanted)


def devices(recipe: Recipe) -> list[Place]:
    """For each run that may train at once, the variables of its share of GPUs and cores."""
    run = recipe.config.run
    size = 1 if run.processes == "auto" else run.processes
    count = torch.cuda.device_count() if recipe.config.compute.device in ("auto", "cuda") else 0
    visible = environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    gpus = visible.split(",")[:count]
    shares = [",".join(gpus[n : n + size]) for n in range(0, len(gpus) - size + 1, size)]
    at_once = recipe.at_once or max(1, len(shares))
    cores = {CORES: max(1, num_cores() // at_once), "OMP_NUM_THREADS": num_threads(at_once * size)}
    cores = {name: str(count) for name, count in cores.items() if at_once > 1}
    own = [{"CUDA_VISIBLE_DEVICES": share} for share in shares] or [{}]
    return [cores | own[number % len(own)] for number in range(at_once)]


def as_json(run: Run) -> dict[str, Any]:
    """A run's results, for other programs."""
    scores = {run.metric: run.score, f"last_{run.metric}": run.last_score}
    others = {name: getattr(run, name) for name in ("loss", "seconds")}
    return {"folder": str(run.folder), "state": run.state} | scores | others


def print_table(head: str, runs: dict[int, Run]) -> None:
    """Print the results of runs in columns, the first of which is called `head`."""
    rows = [[(head, str(number)), *run.results] for number, run in runs.items()]
    print("\n".join(columns(rows, str.rjust)))


def mean_text(found: Mean, over: str, metric: str) -> str:
    """The mean of a metric, in words; `over` is what it is the mean of."""
    unit, _, digits = scale(metric)
    numbers = found.deviation, found.low, found.high
    deviation, low, high = (f"{unit * number:.{digits}f}" for number in numbers)
    return (
        f"{metric_number(metric, found.mean)} ± {deviation} (standard deviation over {over}), "
        f"{CONFIDENCE:.0%} interval of the mean: {low} .. {high}"
    )
