"""Measures what each tip gains on this machine, with the user's preset and images."""

import math
import os
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...config import Config
from ...errors import UserError, choose
from ...runtime.config_dict import changed_knobs, flatten, words_of
from ...runtime.distributed import join_world
from ...runtime.files import write_json, write_text
from ...runtime.launch import is_launched, num_processes
from ...runtime.machine import device_name
from ...runtime.run_dir import environment, open_run
from ...settle import settle
from .measure import CONFIDENCE, FULL, QUICK, Budget, Row, measure, table_line
from .timed_run import DatasetCache, Setup, Variant, Variants, kept_switches, with_knobs
from .tips import SAMPLE, SLOW, find_tips

MIN_BATCH_SIZE = 16  # that still tells what a larger batch would gain
MIN_ROWS = 3  # that are measured however long it takes
NO_TIME = "no time left"
HEAD = [table_line("tip", "", "images/s", "gain"), "|---|---|--:|---|"]


def bench(  # noqa: PLR0917 - what to measure
    config: Config,
    preset: Config,
    command: str,
    names: Sequence[str] = (),
    budget: Budget = FULL,
    leave_out: bool = False,
) -> None:
    """Measure the tips `names`, or all, and write `bench.json` and `bench.md` to the run folder.

    `command` trains `preset`, from which the user made `config`. With `leave_out`, the best setting
    is then compared with itself without each of its tips.

    Raises:
        UserError: if there is no such tip, or the config, the data or the folder is unusable.
    """
    names = tuple(dict.fromkeys(names))
    for name in names:
        choose("tip", name, find_tips())
    if is_launched():
        raise UserError("bench starts the processes that it needs by itself: no torchrun")
    # cuBLAS reads it at its first product, for `deterministic` too: see `seed_everything`.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    began = time.monotonic()
    folder = Path(config.run.dir)
    with kept_switches(), join_world(config.compute) as world, open_run(config, world):
        datasets = DatasetCache(world)
        best = Row("best")
        try:
            setup, rate = open_setup(config, datasets, budget)
            rows = [plan_row(name, setup, name in names, budget) for name in names or find_tips()]
            text = [introduce(setup, rows, budget, rate), "", *HEAD]
            print("\n".join(text), flush=True)
            about = {"command": command, "environment": environment(world)}
            about |= {"config": flatten(setup.config)}
            queue = [*rows, best]
            for number, row in enumerate(queue):  # which may grow
                spare = budget.total_seconds - (time.monotonic() - began)
                is_late = spare < budget.row_seconds / 2 and count(rows) >= MIN_ROWS
                if row is best:
                    row.variants = combine(setup, rows)
                elif number < len(rows) and row.variants and is_late:
                    row.variants = {}
                    row.reason = f"{NO_TIME}: --rows {row.name}"
                if row.variants:
                    left = sum(not other.reason for other in queue[number:])
                    seconds = min(budget.row_seconds, spare / left)
                    measure(row.variants, datasets, budget, seconds)
                for line in row.lines():
                    text.append(line)
                    print(line, flush=True)
                if row is best and leave_out:
                    tuned = with_knobs(setup.config, best_knobs(best))
                    queue += plan_left_out(rows, replace(setup, config=tuned), budget)
                about |= {"rows": [r.json() for r in queue if r is not best], "best": best.json()}
                write_json(folder / "bench.json", about)
        finally:
            shutil.rmtree(folder / SAMPLE, ignore_errors=True)
        sentence = conclude(best, rows, config, preset, command)
        write_json(folder / "bench.json", about | {"verdict": sentence})
        write_text(folder / "bench.md", "\n".join([*text, "", sentence, ""]))
        print(f"\nwritten: {folder}/bench.md and bench.json\n{sentence}")


def open_setup(config: Config, datasets: DatasetCache, budget: Budget) -> tuple[Setup, float]:
    """Open the images, settle the config as training does, and shrink batches that take too long.

    Returns the setup, and how many images per second the preset trains with.
    """
    world = datasets.world
    data = datasets.open(with_knobs(config, {"data.workers": 0}))
    config, _ = settle(config, data, world)
    streamed = datasets.open(with_knobs(config, {"data.where": "stream"}))
    streamed.close()
    images = {"data.where": data.where, "data.workers": streamed.workers}
    size = max(1, config.data.batch_size // num_processes(config.run, config.compute))
    once = replace(budget, rounds=(1, 1))
    while True:
        config = with_knobs(config, images | {"data.batch_size": size})
        data = datasets.open(config)
        preset = Variant(config)
        measure({"preset": preset}, datasets, once, 0)
        if not preset.rate:
            raise UserError(f"the preset can't be trained as it stands: {preset.failure}")
        less = affordable_batch_size(size, config.optim.accumulate, preset.rate, budget)
        if less == size:
            return Setup(config, world, data), preset.rate
        print(f"a step takes {size / preset.rate:.2f} s: here with {less} images", flush=True)
        size = less


def affordable_batch_size(size: int, parts: int, rate: float, budget: Budget) -> int:
    """The batch size, halved until a step fits the budget at `rate` images per second."""
    affordable = budget.step_seconds * rate
    while size > affordable and size >= 2 * MIN_BATCH_SIZE and size % (4 * parts) == 0:
        size //= 2  # each of `parts` stays even, as mixing needs pairs
    return size


def plan_row(name: str, setup: Setup, is_asked: bool, budget: Budget) -> Row:
    """The variants of a tip, or the reason why it can't be measured."""
    if name in SLOW and budget is QUICK and not is_asked:
        return Row(name, reason=f"takes a minute: without --quick, or with --rows {name}")
    try:
        variants = find_tips()[name](setup)
    except UserError as error:  # such as an image that cannot be read, and so not be prepared
        variants = str(error)
    if isinstance(variants, str):
        return Row(name, reason=variants)
    first = next(iter(variants.values()))
    note = " ".join(words_of(changed_knobs(first.config, setup.config)))
    return Row(name, note=note, variants=variants)


def introduce(setup: Setup, rows: list[Row], budget: Budget, rate: float) -> str:
    """What is measured, on which machine, and about how long that takes."""
    config = setup.config
    planned = [row for row in rows if not row.reason]
    seconds = min((len(planned) + 1) * budget.row_seconds, budget.total_seconds)
    seconds += 60 * sum(row.name in SLOW for row in planned)
    return (
        f"{config.model.name} on {config.data.name}, {config.data.batch_size} images per step, "
        f"{config.precision}, images: {config.data.where}; {device_name(setup.world.device)}, "
        f"torch {torch.__version__}: {rate:,.0f} images/s.\n"
        f"{len(planned)} of {len(rows)} tips can be measured here, in about "
        f"{math.ceil(seconds / 60)} min. Gain: the median ratio of times that were taken\nin turn "
        f"with the first variant of a tip, and its interval of {CONFIDENCE:.0%} confidence."
    )


def count(rows: list[Row]) -> int:
    """How many tips were measured."""
    return sum(any(variant.seconds for variant in row.variants.values()) for row in rows)


def combine(setup: Setup, rows: list[Row]) -> Variants:
    """The preset, and all knobs together that were found to be faster; nothing without any."""
    knobs: dict[str, Any] = {}
    for row in rows:
        choices = {n: v for n, v in row.variants.items() if v.is_choice and v.change is None}
        current = [name for name, variant in choices.items() if variant.config == setup.config]
        gains = {name: row.gain(name, current[0]) for name in choices if current}
        better = {name: gain.median for name, gain in gains.items() if gain and gain.is_faster}
        if better:
            best = choices[max(better, key=better.__getitem__)]
            knobs |= changed_knobs(best.config, setup.config)
    together = {"best": Variant(with_knobs(setup.config, knobs))}
    return {"preset": Variant(setup.config)} | together if knobs else {}


def best_knobs(best: Row) -> dict[str, Any]:
    """The knobs that are faster together; none where they are not."""
    gain = best.gain("best") if best.variants else None
    configs = [variant.config for variant in best.variants.values()]
    return changed_knobs(*reversed(configs)) if gain and gain.is_faster else {}


def plan_left_out(rows: list[Row], tuned: Setup, budget: Budget) -> Iterator[Row]:
    """For each tip that the best setting has: that setting, and the same without the tip."""
    names = [row.name for row in rows if any(v.is_choice for v in row.variants.values())]
    for row in (plan_row(name, tuned, True, budget) for name in names):
        without = next(iter(row.variants), "")
        for name, variant in row.variants.items():
            if name != without and (variant.change, variant.config) == (None, tuned.config):
                variants = {"best": variant, without: row.variants[without]}
                yield Row(f"without {row.name}", variants=variants)


def conclude(best: Row, rows: list[Row], config: Config, preset: Config, command: str) -> str:
    """The last line: the command line of the best setting that was measured."""
    knobs = best_knobs(best)
    changed = changed_knobs(with_knobs(config, knobs), preset, {"run.dir", "run.fresh"})
    line = shlex.join([*shlex.split(command), *words_of(changed)])
    skipped = sum(row.reason.startswith(NO_TIME) for row in rows)
    found = f"of {count(rows)} measured tips"
    found += f" ({skipped} skipped for lack of time)" * bool(skipped)
    better = f"best setting {found}, {best.gain('best')} against the preset" if knobs else ""
    return f"{better or f'none {found} helps'}: {line}"
