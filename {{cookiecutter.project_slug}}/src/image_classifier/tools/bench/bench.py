"""What each tip buys, measured on this machine, with the user's preset and images."""

import math
import shlex
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from statistics import median

import torch

from ...config import Config, UserError, flatten, words_of
from ...data import Samples, choose_workers
from ...precision_probe import settle_precision
from ...runtime.distributed import join_world
from ...runtime.launch import is_launched, num_processes
from ...runtime.run_dir import environment, open_run, write_json, write_text
from .tips import SAMPLE, SLOW, TIPS, Case, NotHereError, Variants
from .tips.case import with_knobs
from .tips.result import about, bars, markdown, row_json, row_lines
from .tips.rounds import CONFIDENCE, FULL, QUICK, Effort, Row, measure
from .tips.trial import DataShelf, Variant, kept_switches

SMALLEST_BATCH = 16  # that still tells what a larger one would gain
FEWEST_ROWS = 3  # that are measured however long it takes: nothing can be concluded from none
NO_TIME = "no time left"  # why a row was not measured
OWN_KNOBS = ("data.name", "data.root", "data.cache")  # of images that only `bench` has


def bench(
    config: Config,
    default: Config,
    command: str,
    folder: Path,
    *,
    names: Sequence[str] = (),
    effort: Effort = FULL,
) -> None:
    """Measure the tips `names`, or all, and write what was found to `folder`.

    `command` trains the preset, whose config is `default`; the user made `config` of it.

    Raises:
        UserError: if there is no such tip, or the config, the data or the folder can't be used.
    """
    check_names(names)
    if is_launched():
        raise UserError("bench starts the processes that it needs by itself: no torchrun")
    began = time.monotonic()
    here = replace(config, run=replace(config.run, dir=str(folder)))
    with kept_switches(), join_world(config.compute) as world, open_run(here, world):
        shelf = DataShelf(world)
        try:
            case = open_case(config, shelf, folder)
            pace = pace_of(case, shelf, effort)
            batch_size = affordable_batch_size(config, pace, effort)
            if batch_size != config.data.batch_size:
                print(f"a step takes {pace:.2f} s: here with {batch_size} images", flush=True)
                case = open_case(with_knobs(config, {"data.batch_size": batch_size}), shelf, folder)
                pace = pace_of(case, shelf, effort)
            chosen = dict.fromkeys(names or TIPS)
            rows = [plan_row(name, case, name in names, effort) for name in chosen]
            introduce(case, rows, effort, pace)
            report = {
                "command": command,
                "environment": environment(world),
                "config": flatten(case.config),
            }
            left = sum(not row.reason for row in rows) + 1  # and the best setting
            num_measured, best = 0, Row("best")
            for number, row in enumerate([*rows, best], start=1):
                if row is best:
                    row.variants = compose(case, rows)
                spare = effort.total_seconds - (time.monotonic() - began)
                may_wait = row is not best and num_measured >= FEWEST_ROWS
                if row.variants and may_wait and spare < least_seconds(row, effort, pace):
                    row.variants, row.reason = {}, f"{NO_TIME}: --rows {row.name}"
                elif row.variants:
                    budget_seconds = min(effort.row_seconds, spare / left)
                    row.timings = measure(row.variants, shelf, effort, budget_seconds)
                    num_measured += 1
                    left -= 1
                for line in row_lines(row):
                    print(line, flush=True)
                report["rows"] = [row_json(row) for row in rows[:number]]
                write_json(folder / "bench.json", report)
        finally:
            shutil.rmtree(folder / SAMPLE, ignore_errors=True)
        sentence = preparing(case, rows) + conclude(best, rows, case, config, default, command)
        write_json(folder / "bench.json", report | {"best": row_json(best), "verdict": sentence})
        write_text(folder / "bench.md", markdown(case, rows, sentence))
        write_text(folder / "bench.svg", bars(rows))
        print(f"\nwritten: {folder}/bench.md, bench.json and bench.svg")
        print(sentence)


def check_names(names: Sequence[str]) -> None:
    """Refuse a tip that there is not.

    Raises:
        UserError: for the first.
    """
    for name in names:
        if name not in TIPS:
            near = get_close_matches(name, TIPS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"--rows: no tip {name!r}; there are: {', '.join(TIPS)}{hint}")


def open_case(config: Config, shelf: DataShelf, folder: Path) -> Case:
    """The user's preset with its images open, and with what is `auto` settled as in training.

    Raises:
        UserError: if it can't be.
    """
    world = shelf.world
    processes = num_processes(config.run, config.compute)
    share = max(1, config.data.batch_size // processes)
    data = shelf.open(with_knobs(config, {"data.workers": 0}))
    config, _ = settle_precision(config, data, world)
    samples = Samples(data.source, config.data, config.seed, config.augment)
    workers, _ = choose_workers(config.data, samples, world)
    settled = {"data.where": data.where, "data.workers": workers}
    whole = with_knobs(config, settled)
    part = with_knobs(whole, {"data.batch_size": share})
    num_gpus = torch.cuda.device_count() if world.device.type == "cuda" else 0
    return Case(part, whole, world, shelf.open(part), folder, num_gpus)


def pace_of(case: Case, shelf: DataShelf, effort: Effort) -> float:
    """Seconds that a step of the preset takes.

    Raises:
        UserError: if it can't be trained here.
    """
    once = replace(effort, rounds=(1, 1))
    timing = measure({"preset": Variant(case.config)}, shelf, once, 0)["preset"]
    if timing.failure:
        raise UserError(f"the preset can't be trained as it stands: {timing.failure}")
    return median(timing.seconds)


def affordable_batch_size(config: Config, pace: float, effort: Effort) -> int:
    """So many images that a step, which takes `pace` seconds now, takes no more than it may."""
    parts = num_processes(config.run, config.compute) * config.optim.accumulate
    size = config.data.batch_size
    while pace > effort.step_seconds and size % (4 * parts) == 0 and size >= 2 * SMALLEST_BATCH:
        size, pace = size // 2, pace / 2  # an even share of each part, as mixing needs pairs
    return size


def plan_row(name: str, case: Case, is_asked: bool, effort: Effort) -> Row:
    """What is to be measured of a tip, or the reason why it can't be."""
    if name in SLOW and effort is QUICK and not is_asked:
        return Row(name, reason=f"takes a minute: without --quick, or with --rows {name}")
    try:
        variants = TIPS[name](case)
    except NotHereError as error:
        return Row(name, reason=str(error))
    preset = flatten(case.config)
    first, *others = (flatten(variant.config) for variant in variants.values())
    shared = {
        knob: value
        for knob, value in first.items()
        if knob not in OWN_KNOBS and value != preset[knob] and all(o[knob] == value for o in others)
    }
    return Row(name, note=" ".join(words_of(shared)), variants=variants)


def introduce(case: Case, rows: list[Row], effort: Effort, pace: float) -> None:
    """Say what will be measured, and about how long it takes if a step takes `pace` seconds."""
    measured = [row for row in rows if not row.reason]
    least = sum(least_seconds(row, effort, pace) for row in measured)
    seconds = max(least, (len(measured) + 1) * effort.row_seconds)
    seconds = min(seconds, effort.total_seconds)
    seconds += 60 * sum(row.name in SLOW for row in measured)
    print(
        f"{about(case)}: {case.config.data.batch_size / pace:,.0f} images/s\n"
        f"{len(measured)} of {len(rows)} tips can be measured here, in about "
        f"{math.ceil(seconds / 60)} min; each is compared with what stands first in it: the median "
        f"of the ratios, and where it lies with {CONFIDENCE:.0%} confidence\n",
        flush=True,
    )


def least_seconds(row: Row, effort: Effort, pace: float) -> float:
    """How long a tip takes at the least, if a step of any variant takes `pace` seconds."""
    turns = effort.rounds[0] + 3  # with the first steps, that are not counted
    return len(row.variants) * turns * max(pace, effort.round_seconds)


def compose(case: Case, rows: list[Row]) -> Variants:
    """The preset, and all knobs together that were found to be better; nothing without any."""
    now, knobs = flatten(case.config), {}
    for row in rows:
        plain = {
            name: variant.config
            for name, variant in row.variants.items()
            if variant.change is None and variant.is_choice and row.timings[name].seconds
        }
        current = next((name for name, config in plain.items() if config == case.config), None)
        if current is None:  # it was not the preset that was measured
            continue
        better = {name: row.gain(current, name) for name in plain}
        better = {name: g.median for name, g in better.items() if g.is_effect and g.median > 1}
        if better:
            winner = flatten(plain[max(better, key=better.__getitem__)])
            knobs |= {knob: value for knob, value in winner.items() if value != now[knob]}
    if not knobs:
        return {}
    return {"preset": Variant(case.config), "best": Variant(with_knobs(case.config, knobs))}


def preparing(case: Case, rows: list[Row]) -> str:
    """What to do with the images first, if that was found to help; else nothing."""
    row = next((row for row in rows if row.name == "prepared"), None)
    if row is None or case.data.where != "stream" or case.data.source.recipe:
        return ""
    better = {name: g for name, g in row.gains().items() if g.is_effect and g.median > 1}
    if not better:
        return ""
    name = max(better, key=lambda name: better[name].median)
    return f"`prepare` the images first ({name}: {better[name]} against the files); "


def conclude(  # noqa: PLR0917 - what was measured, and the words for it
    best: Row, rows: list[Row], case: Case, config: Config, default: Config, command: str
) -> str:
    """The last line: the command line of the best setting among what was measured."""
    gain, knobs = best.gains().get("best"), {}
    if gain is not None and gain.is_effect and gain.median > 1:
        before, after = flatten(case.config), flatten(best.variants["best"].config)
        knobs = {knob: value for knob, value in after.items() if value != before[knob]}
    preset, chosen = flatten(default), flatten(config) | knobs
    changed = {knob: value for knob, value in chosen.items() if value != preset[knob]}
    line = shlex.join([*shlex.split(command), *words_of(changed)])
    count = sum(any(timing.seconds for timing in row.timings.values()) for row in rows)
    left_out = sum(row.reason.startswith(NO_TIME) for row in rows)
    found = f"of the {count} tips measured" if count != 1 else "of the one tip measured"
    if left_out:
        found += f" ({left_out} more were not, for want of time: bench without --quick)"
    if knobs:
        return f"best setting {found}, {gain} against the preset: {line}"
    return f"{found}, no knob gains anything here: {line}"
