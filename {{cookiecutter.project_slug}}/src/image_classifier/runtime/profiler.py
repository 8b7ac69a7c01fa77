"""Where the time of a step goes: a trace of a few steps, and a table of it."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from ..config import Config
from .distributed import World
from .phases import PHASES
from .printable import printable

T = TypeVar("T")

SKIPPED_STEPS, WARMUP_STEPS, RECORDED_STEPS = 10, 3, 5


@contextmanager
def profiler(config: Config, world: World) -> Iterator["profile | NoProfiler"]:
    """A function that hands batches on. With `config.profile` rank 0 records a few of their steps.

    Writes `profile/trace.json.gz`, for https://ui.perfetto.dev, and on a GPU
    `profile/memory.pickle`, for https://docs.pytorch.org/memory_viz; prints the shares of the
    phases and the most expensive operations.
    """
    if not config.profile or not world.is_main:
        yield NoProfiler()
        return
    target = Path(config.run.dir, "profile")
    target.mkdir(exist_ok=True)
    is_cuda = world.device.type == "cuda"

    recordings = []

    def finish(recorded: profile) -> None:
        recordings.append(recorded)
        recorded.export_chrome_trace(str(target / "trace.json.gz"))
        if is_cuda:
            torch.cuda.memory._dump_snapshot(str(target / "memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        print(describe(recorded, is_cuda))
        trace = printable(str(target / "trace.json.gz"))
        print(f"trace of {RECORDED_STEPS} steps: {trace} (ui.perfetto.dev)")

    if is_cuda:
        torch.cuda.memory._record_memory_history(max_entries=100_000)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * is_cuda
    with profile(
        activities=activities,
        schedule=schedule(
            skip_first=SKIPPED_STEPS, wait=0, warmup=WARMUP_STEPS, active=RECORDED_STEPS, repeat=1
        ),
        on_trace_ready=finish,
        record_shapes=True,
        profile_memory=True,
        with_stack=True,
        acc_events=True,  # or else torch 2.11 warns that it would forget earlier recordings
    ) as recorder:
        yield recorder
    if not recordings:
        needed = SKIPPED_STEPS + WARMUP_STEPS + RECORDED_STEPS
        print(f"nothing recorded: --profile needs a run with {needed} steps or more to go")
    gc.collect()  # a trace holds many small objects in cycles


class NoProfiler:
    """What stands in for the profiler where there is none."""

    def step(self) -> None:
        """Do nothing."""


def describe(recorded: profile, is_cuda: bool) -> str:
    """Two tables: the share of each phase of a step, and the most expensive operations."""
    averages = recorded.key_averages()
    spent = {}
    for event in averages:
        if event.key in PHASES:
            on_device = event.device_time_total if is_cuda else 0
            spent[event.key] = max(spent.get(event.key, 0), on_device or event.cpu_time_total)
    total = sum(spent.values()) or 1
    shares = "\n".join(
        f"  {phase:<14} {spent[phase] / 1000 / RECORDED_STEPS:8.2f} ms  {spent[phase] / total:4.0%}"
        for phase in PHASES
        if phase in spent
    )
    by = "self_device_time_total" if is_cuda else "self_cpu_time_total"
    table = averages.table(sort_by=by, row_limit=12, max_name_column_width=40)
    return f"phases of a step:\n{shares}\n{table}"
