"""Several runs of one recipe: as many at once as there are devices, resumed by the same command.

Each is an ordinary run in a folder of its own; a file beside that folder has what it prints.
"""

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from os import environ
from pathlib import Path
from typing import Any

import torch

from ...config import FREE_TO_CHANGE
from ...errors import EXIT_DONE, EXIT_RESTART, EXIT_USAGE, FaultError, UserError
from ...extensions import of_tools
from ...metrics import metric_number, metric_title, scale
from ...runtime.config_dict import flatten
from ...runtime.console import clock, say
from ...runtime.files import read_object
from ...runtime.machine import num_threads
from ...runtime.run_dir import hold
from ...runtime.signals import TIME_LIMIT, Signals, StoppedError
from ...tasks import metric_of
from .child_runs import POLL_SECONDS, end_run, last_line, start_run, wait_until_free
from .recipe import Recipe
from .saved_runs import Run, read_run
from .statistics import CONFIDENCE, Mean

Knobs = dict[str, Any]  # options by their dotted names
Place = dict[str, str]  # the environment variables that give a run its GPUs and its cores


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
        say(f"{name}: {phrase(run)}, done before")
    places = devices(recipe)[: len(todo)]
    if todo:
        where = f"what they print is in {recipe.folder / next(iter(todo))}.txt and so on"
        say(f"to train: {len(todo)} of {len(each)} runs, {len(places)} at once; {where}")
    failed = []
    with (
        locked(recipe.folder),
        Signals() as signals,
        closing(train_in(places, recipe, todo, signals)) as ends,
    ):
        for name, code in ends:
            if run := ended(recipe.folder / name, code):
                runs[name] = run
                say(f"{name}: {phrase(run)}, {len(runs)} of {len(each)}")
            elif code != EXIT_RESTART:
                failed.append(name)
    if len(runs) == len(each):
        return [runs[name] for name in each]
    account = f"{len(runs)} of {len(each)} runs in {recipe.folder} are done"
    if failed and not signals.number:
        raise FaultError(f"{account}, {', '.join(failed)} failed; run the same command to retry")
    saved = f"{account}, the others saved; run the same command to resume"
    raise StoppedError(signals.number or TIME_LIMIT, saved)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """A block in which no other command trains runs in `folder`: two would share their logs."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a+") as lock:
        hold(lock, folder)
        yield


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
                words = recipe.words(name, todo[name])
                output = recipe.folder / f"{name}.txt"
                wait_until_free(recipe.folder / name, recipe.config.run.timeout_seconds)
                training[name] = start_run(words, output, **place), place
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
    if recipe.config.run.fresh:
        return False
    try:
        status = read_object(recipe.folder / name / "status.json")
        was = of_tools() | read_object(recipe.folder / name / "config.json")
    except OSError:  # it has not begun
        return False
    free = [*FREE_TO_CHANGE]
    if recipe.config.precision == "auto":  # `config.json` has what it chose
        free.append("precision")
    wanted = flatten(recipe.config) | each[name]
    same = (was.get(k) == v for k, v in wanted.items() if not k.startswith(tuple(free)))
    return status.get("state") == "done" and all(same) and metric_of(was) == metric_of(wanted)


def devices(recipe: Recipe) -> list[Place]:
    """For each run that may train at once, the variables of its share of GPUs and cores."""
    run = recipe.config.run
    gpus = []
    size = 1 if run.processes == "auto" else run.processes
    if recipe.config.compute.device in ("auto", "cuda"):
        count = torch.cuda.device_count()
        visible = environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
        gpus = visible.split(",")[:count]
    shares = [",".join(gpus[n : n + size]) for n in range(0, len(gpus) - size + 1, size)]
    at_once = recipe.at_once or max(1, len(shares))
    places = []
    for number in range(at_once):
        place = {"CUDA_VISIBLE_DEVICES": shares[number % len(shares)]} if shares else {}
        if at_once > 1:
            place["OMP_NUM_THREADS"] = str(num_threads(at_once * size))
        places.append(place)
    return places


def ended(folder: Path, code: int) -> Run | None:
    """The run in `folder`, which ended with exit code `code`; if not done, None, and why is said.

    Raises:
        UserError: what the run said, if it rejected its options or data.
    """
    if code == EXIT_DONE:
        return read_run(folder)
    reason = last_line(folder.with_name(f"{folder.name}.txt"))
    if code == EXIT_USAGE:
        raise UserError(f"{folder.name}: {reason.removeprefix('error: ')}")
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    say(f"{folder.name}{'' if code == EXIT_RESTART else f' failed ({how})'}: {reason}")
    return None


def phrase(run: Run) -> str:
    """A run's results, in words."""
    return ", ".join(f"{head} {cell}" for head, cell in zip(heads(run), results(run), strict=True))


def heads(run: Run) -> tuple[str, ...]:
    """What `results` are."""
    return metric_title(run.metric), "last", "loss", "training"


def results(run: Run) -> tuple[str, ...]:
    """A run's results, as columns of a table: of best.pt, but for the score of the last weights."""
    scores = (metric_number(run.metric, value) for value in (run.score, run.last_score))
    return *scores, f"{run.loss:.4f}", clock(run.seconds)


def as_json(run: Run) -> dict[str, Any]:
    """A run's results, for other programs."""
    scores = {run.metric: run.score, f"last_{run.metric}": run.last_score}
    others = {name: getattr(run, name) for name in ("loss", "seconds")}
    return {"folder": str(run.folder), "state": run.state} | scores | others


def print_table(head: str, names: list[object], runs: list[Run]) -> None:
    """Print the results of runs in columns; `head` is what `names` are."""
    rows = [(head, *heads(runs[0]))]
    rows += [(str(name), *results(run)) for name, run in zip(names, runs, strict=True)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print("\n".join("  ".join(map(str.rjust, row, widths)) for row in rows))


def mean_text(found: Mean, over: str, metric: str) -> str:
    """The mean of a metric, in words; `over` is what it is the mean of."""
    unit, _, digits = scale(metric)
    deviation = f"{unit * found.deviation:.{digits}f}"
    low = f"{unit * found.low:.{digits}f}"
    high = f"{unit * found.high:.{digits}f}"
    return (
        f"{metric_number(metric, found.mean)} ± {deviation} (standard deviation over {over}), "
        f"{CONFIDENCE:.0%} interval of the mean: {low} .. {high}"
    )
