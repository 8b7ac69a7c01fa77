"""Measures what each tip gains on this machine, with the user's preset and images."""

import math
import shlex
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ...config import Config
from ...data import Samples, choose_workers
from ...errors import UserError, choose
from ...precision import settle_precision
from ...runtime.config_dict import flatten, words_of
from ...runtime.distributed import join_world
from ...runtime.files import write_json, write_text
from ...runtime.launch import is_launched, num_processes
from ...runtime.run_dir import environment, open_run
from .data_loading import SAMPLE
from .measure import CONFIDENCE, FULL, QUICK, Budget, Row, measure
from .results import describe, markdown, row_json, terminal_lines
from .setup import Setup, UnavailableError, Variant, Variants, with_knobs
from .timed_run import DatasetCache, kept_switches
from .tips import SLOW, TIPS

MIN_BATCH_SIZE = 16  # that still tells what a larger batch would gain
MIN_ROWS = 3  # that are measured however long it takes
NO_TIME = "no time left"
OWN_KNOBS = ("data.name", "data.root", "data.cache")  # of images that only `bench` has


def bench(
    config: Config,
    preset: Config,
    command: str,
    folder: Path,
    *,
    names: Sequence[str] = (),
    budget: Budget = FULL,
) -> None:
    """Measure the tips `names`, or all, and write `bench.json` and `bench.md`.

    `command` trains `preset`, from which the user made `config`.

    Raises:
        UserError: if there is no such tip, or the config, the data or the folder is unusable.
    """
    names = tuple(dict.fromkeys(names))
    for name in names:
        choose("tip", name, TIPS)
    if is_launched():
        raise UserError("bench starts the processes that it needs by itself: no torchrun")
    began = time.monotonic()
    here = replace(config, run=replace(config.run, dir=str(folder)))
    with kept_switches(), join_world(config.compute) as world, open_run(here, world):
        datasets, best = DatasetCache(world), Row("best")
        try:
            setup, pace = open_affordable(config, datasets, folder, budget)
            rows = [plan_row(name, setup, name in names, budget) for name in names or TIPS]
            introduce(setup, rows, budget, pace)
            about = {"command": command, "environment": environment(world)}
            about |= {"config": flatten(setup.config)}
            for number, row in enumerate([*rows, best]):
                spare = budget.total_seconds - (time.monotonic() - began)
                if row is best:
                    row.variants = combine(setup, rows)
                elif spare < budget.row_seconds / 2 and sum(map(is_measured, rows)) >= MIN_ROWS:
                    row.variants, row.reason = {}, row.reason or f"{NO_TIME}: --rows {row.name}"
                if row.variants:
                    left = 1 + sum(not other.reason for other in rows[number:])
                    seconds = min(budget.row_seconds, spare / left)
                    row.timings = measure(row.variants, datasets, budget, seconds)
                for line in terminal_lines(row):
                    print(line, flush=True)
                write_json(folder / "bench.json", about | {"rows": list(map(row_json, rows))})
        finally:
            shutil.rmtree(folder / SAMPLE, ignore_errors=True)
        sentence = conclude(best, rows, setup, config, preset, command)
        about |= {"rows": list(map(row_json, rows)), "best": row_json(best), "verdict": sentence}
        write_json(folder / "bench.json", about)
        write_text(folder / "bench.md", markdown(setup, rows, sentence))
        print(f"\nwritten: {folder}/bench.md and bench.json\n{sentence}")


def open_affordable(
    config: Config, datasets: DatasetCache, folder: Path, budget: Budget
) -> tuple[Setup, float]:
    """The setup, with fewer images per step if steps take too long; and seconds per step.

    Raises:
        UserError: if the preset can't be trained here.
    """
    once = replace(budget, rounds=(1, 1))
    while True:
        setup = open_setup(config, datasets, folder)
        timing = measure({"preset": Variant(setup.config)}, datasets, once, 0)["preset"]
        if timing.failure:
            raise UserError(f"the preset can't be trained as it stands: {timing.failure}")
        pace = median(timing.seconds)
        batch_size = affordable_batch_size(config, pace, budget)
        if batch_size == config.data.batch_size:
            return setup, pace
        print(f"a step takes {pace:.2f} s: here with {batch_size} images", flush=True)
        config = with_knobs(config, data__batch_size=batch_size)


def open_setup(config: Config, datasets: DatasetCache, folder: Path) -> Setup:
    """Open the images, and settle every `auto` as training does.

    Raises:
        UserError: if that fails.
    """
    world = datasets.world
    share = max(1, config.data.batch_size // num_processes(config.run, config.compute))
    data = datasets.open(with_knobs(config, data__workers=0))
    config, _ = settle_precision(config, data, world)
    samples = Samples(data.source, config.data, config.seed, config.augment)
    workers, _ = choose_workers(config.data, samples, world)
    whole = with_knobs(config, data__where=data.where, data__workers=workers)
    part = with_knobs(whole, data__batch_size=share)
    num_gpus = torch.cuda.device_count() if world.device.type == "cuda" else 0
    return Setup(part, whole, world, datasets.open(part), folder, num_gpus)


def affordable_batch_size(config: Config, pace: float, budget: Budget) -> int:
    """The batch size, halved until a step, which takes `pace` seconds now, fits the budget."""
    parts = num_processes(config.run, config.compute) * config.optim.accumulate
    size = config.data.batch_size
    while pace > budget.step_seconds and size % (4 * parts) == 0 and size >= 2 * MIN_BATCH_SIZE:
        size, pace = size // 2, pace / 2  # each part stays even, as mixing needs pairs
    return size


def plan_row(name: str, setup: Setup, is_asked: bool, budget: Budget) -> Row:
    """The variants of a tip, or the reason why it can't be measured."""
    if name in SLOW and budget is QUICK and not is_asked:
        return Row(name, reason=f"takes a minute: without --quick, or with --rows {name}")
    try:
        variants = TIPS[name](setup)
    except UnavailableError as error:
        return Row(name, reason=str(error))
    first, *others = (changed_knobs(setup.config, v.config) for v in variants.values())
    shared = {
        knob: value
        for knob, value in first.items()
        if knob not in OWN_KNOBS and all((knob, value) in o.items() for o in others)
    }
    return Row(name, note=" ".join(words_of(shared)), variants=variants)


def introduce(setup: Setup, rows: list[Row], budget: Budget, pace: float) -> None:
    """Print what is measured, and about how long that takes."""
    planned = [row for row in rows if not row.reason]
    seconds = min((len(planned) + 1) * budget.row_seconds, budget.total_seconds)
    seconds += 60 * sum(row.name in SLOW for row in planned)
    print(
        f"{describe(setup)}: {setup.config.data.batch_size / pace:,.0f} images/s\n"
        f"{len(planned)} of {len(rows)} tips can be measured here, in about "
        f"{math.ceil(seconds / 60)} min. Each gain is over the first variant of the tip: the "
        f"median of the ratios, and its interval of {CONFIDENCE:.0%} confidence.\n"
    )


def is_measured(row: Row) -> bool:
    """Whether a variant of a tip was timed."""
    return any(timing.seconds for timing in row.timings.values())


def changed_knobs(before: Config, after: Config) -> dict[str, Any]:
    """The knobs of `after` that differ from those of `before`."""
    was = flatten(before)
    return {knob: value for knob, value in flatten(after).items() if value != was[knob]}


def combine(setup: Setup, rows: list[Row]) -> Variants:
    """The preset, and all knobs together that were found to be faster; nothing without any."""
    knobs: dict[str, Any] = {}
    for row in rows:
        plain = {
            name: variant.config
            for name, variant in row.variants.items()
            if variant.change is None and variant.is_choice and row.timings[name].seconds
        }
        current = next((name for name, config in plain.items() if config == setup.config), None)
        if current is None:  # the preset itself was not measured
            continue
        gains = {name: row.gain(current, name) for name in plain}
        better = {name: gain.median for name, gain in gains.items() if gain.is_faster}
        if better:
            knobs |= changed_knobs(setup.config, plain[max(better, key=better.__getitem__)])
    best = {"best": Variant(with_knobs(setup.config, **knobs))}
    return {"preset": Variant(setup.config)} | best if knobs else {}


def conclude(  # noqa: PLR0917 - the measurements, and the words for them
    best: Row, rows: list[Row], setup: Setup, config: Config, preset: Config, command: str
) -> str:
    """The last line: the command line of the best setting that was measured."""
    gain, knobs = best.gains().get("best"), {}
    if gain is not None and gain.is_faster:
        knobs = changed_knobs(setup.config, best.variants["best"].config)
    changed = changed_knobs(preset, with_knobs(config, **knobs))
    line = shlex.join([*shlex.split(command), *words_of(changed)])
    skipped = sum(row.reason.startswith(NO_TIME) for row in rows)
    found = f"of {sum(map(is_measured, rows))} measured tips"
    found += f" ({skipped} skipped for lack of time)" * bool(skipped)
    result = f"best setting {found}, {gain} against the preset" if knobs else f"{found}, none helps"
    return f"{result}: {line}"
