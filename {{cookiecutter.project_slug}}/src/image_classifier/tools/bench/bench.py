"""Measures what each tip gains on this machine, with the user's preset and images."""

import math
import shlex
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from ...config import Config, flatten, words_of
from ...data import Samples, choose_workers
from ...errors import UserError, choose
from ...precision import settle_precision
from ...runtime.distributed import join_world
from ...runtime.files import write_json, write_text
from ...runtime.launch import is_launched, num_processes
from ...runtime.run_dir import environment, open_run
from .data_loading import SAMPLE
from .measure import CONFIDENCE, FULL, QUICK, Budget, Row, measure
from .results import bars, describe, markdown, row_json, terminal_lines
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
    """Measure the tips `names`, or all, and write `bench.json`, `bench.md` and `bench.svg`.

    `command` trains `preset`, from which the user made `config`.

    Raises:
        UserError: if there is no such tip, or the config, the data or the folder is unusable.
    """
    for name in names:
        choose("tip", name, TIPS)
    if is_launched():
        raise UserError("bench starts the processes that it needs by itself: no torchrun")
    began = time.monotonic()
    here = replace(config, run=replace(config.run, dir=str(folder)))
    with kept_switches(), join_world(config.compute) as world, open_run(here, world):
        datasets = DatasetCache(world)
        try:
            setup, pace = open_affordable(config, datasets, folder, budget)
            chosen = dict.fromkeys(names or TIPS)
            rows = [plan_row(name, setup, name in names, budget) for name in chosen]
            introduce(setup, rows, budget, pace)
            report = {
                "command": command,
                "environment": environment(world),
                "config": flatten(setup.config),
            }
            planned = [row for row in rows if not row.reason]
            best = Row("best")
            for row in [*planned, best]:
                if row is best:
                    row.variants = combine(setup, rows)
                spare = budget.total_seconds - (time.monotonic() - began)
                num_measured = sum(bool(other.timings) for other in rows)
                is_optional = row is not best and num_measured >= MIN_ROWS
                if is_optional and spare < least_seconds(row, budget, pace):
                    row.variants, row.reason = {}, f"{NO_TIME}: --rows {row.name}"
                elif row.variants:
                    left = sum(not (other.timings or other.reason) for other in planned) + 1
                    seconds = min(budget.row_seconds, spare / left)
                    row.timings = measure(row.variants, datasets, budget, seconds)
                for line in terminal_lines(row):
                    print(line, flush=True)
                write_json(folder / "bench.json", report | {"rows": list(map(row_json, rows))})
        finally:
            shutil.rmtree(folder / SAMPLE, ignore_errors=True)
        sentence = conclude(best, rows, setup, config, preset, command)
        report |= {"rows": list(map(row_json, rows)), "best": row_json(best), "verdict": sentence}
        write_json(folder / "bench.json", report)
        write_text(folder / "bench.md", markdown(setup, rows, sentence))
        write_text(folder / "bench.svg", bars(rows))
        print(f"\nwritten: {folder}/bench.md, bench.json and bench.svg\n{sentence}")


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
    preset = flatten(setup.config)
    first, *others = (flatten(variant.config) for variant in variants.values())
    shared = {
        knob: value
        for knob, value in first.items()
        if knob not in OWN_KNOBS and value != preset[knob] and all(o[knob] == value for o in others)
    }
    return Row(name, note=" ".join(words_of(shared)), variants=variants)


def introduce(setup: Setup, rows: list[Row], budget: Budget, pace: float) -> None:
    """Print what will be measured, the skipped tips, and about how long it takes."""
    measured = [row for row in rows if not row.reason]
    least = sum(least_seconds(row, budget, pace) for row in measured)
    seconds = max(least, (len(measured) + 1) * budget.row_seconds)
    seconds = min(seconds, budget.total_seconds) + 60 * sum(row.name in SLOW for row in measured)
    print(
        f"{describe(setup)}: {setup.config.data.batch_size / pace:,.0f} images/s\n"
        f"{len(measured)} of {len(rows)} tips can be measured here, in about "
        f"{math.ceil(seconds / 60)} min. Each gain is over the first variant of the tip: the "
        f"median of the ratios, and its interval of {CONFIDENCE:.0%} confidence.\n"
    )
    for line in (line for row in rows if row.reason for line in terminal_lines(row)):
        print(line, flush=True)


def least_seconds(row: Row, budget: Budget, pace: float) -> float:
    """How long a tip takes at least, if a step of any variant takes `pace` seconds."""
    rounds = budget.rounds[0] + 3  # with those of warming up
    return len(row.variants) * rounds * max(pace, budget.round_seconds)


def combine(setup: Setup, rows: list[Row]) -> Variants:
    """The preset, and all knobs together that were found to be faster; nothing without any."""
    preset, knobs = flatten(setup.config), {}
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
            winner = flatten(plain[max(better, key=better.__getitem__)])
            knobs |= {knob: value for knob, value in winner.items() if value != preset[knob]}
    if not knobs:
        return {}
    best = Variant(with_knobs(setup.config, **knobs))
    return {"preset": Variant(setup.config), "best": best}


def advise_preparing(setup: Setup, rows: list[Row]) -> str:
    """Advice to prepare the images first, if that was found to help; else nothing."""
    gains = next((row.gains() for row in rows if row.name == "prepared"), {})
    better = {name: gain.median for name, gain in gains.items() if gain.is_faster}
    if not better or setup.data.where != "stream" or setup.data.source.recipe:
        return ""
    name = max(better, key=better.__getitem__)
    return f"`prepare` the images first ({name}: {gains[name]} against the files); "


def conclude(  # noqa: PLR0917 - the measurements, and the words for them
    best: Row, rows: list[Row], setup: Setup, config: Config, preset: Config, command: str
) -> str:
    """The last line: the command line of the best setting that was measured."""
    gain, knobs = best.gains().get("best"), {}
    if gain is not None and gain.is_faster:
        before, after = flatten(setup.config), flatten(best.variants["best"].config)
        knobs = {knob: value for knob, value in after.items() if value != before[knob]}
    was, chosen = flatten(preset), flatten(config) | knobs
    changed = {knob: value for knob, value in chosen.items() if value != was[knob]}
    line = shlex.join([*shlex.split(command), *words_of(changed)])
    count = sum(any(timing.seconds for timing in row.timings.values()) for row in rows)
    skipped = sum(row.reason.startswith(NO_TIME) for row in rows)
    found = f"of {count} measured tips" + f" ({skipped} skipped for lack of time)" * bool(skipped)
    result = f"best setting {found}, {gain} against the preset" if knobs else f"{found}, none helps"
    return f"{advise_preparing(setup, rows)}{result}: {line}"
