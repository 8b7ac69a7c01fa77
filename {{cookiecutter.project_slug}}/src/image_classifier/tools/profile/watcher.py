"""`--profile`: where the time of a step goes, and which lines of Python wait for the GPU.

To read the trace: https://ui.perfetto.dev; the memory snapshot: https://docs.pytorch.org/memory_viz.
"""

import gc
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEventAvg
from torch.profiler import ProfilerActivity, profile, schedule

from ...checkpoints import TrainState
from ...runtime.console import printable
from ...runtime.phases import PHASES
from ...tracking import Setup

SKIPPED_STEPS, WARMUP_STEPS, RECORDED_STEPS = 10, 3, 5


@contextmanager
def watch(setup: Setup, state: TrainState) -> Iterator[Callable[[], bool]]:
    """A block in which rank 0 records a few steps if `--profile`; call its value after each.

    Writes `profile/trace.json.gz` and on a GPU `profile/memory.pickle` to the run folder; prints
    the time of each phase of a step, and the most expensive operations.
    """
    config = setup.config
    world = setup.world
    if not config.profile or not world.is_main:
        yield lambda: False
        return
    data = setup.train_data
    skipped = steps_to_skip(state.step, data.steps_in(config.run.evaluate_every_epochs))
    needed = skipped + WARMUP_STEPS + RECORDED_STEPS
    if (left := data.total_steps - state.step) < needed:
        print(f"nothing is recorded: --profile needs a run with {needed} steps to go, not {left}")
        yield lambda: False
        return
    folder = Path(config.run.dir, "profile")
    folder.mkdir(exist_ok=True)
    trace = str(folder / "trace.json.gz")
    is_cuda = world.device.type == "cuda"
    if not is_cuda:  # where torch is built for GPUs, it would report that there is no driver
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")

    def end_step() -> bool:
        recorder.step()
        if is_cuda:  # a warning names each line of Python that waits for the GPU
            is_last_skipped = recorder.step_num == skipped - 1
            torch.cuda.set_sync_debug_mode("warn" if is_last_skipped else "default")
        return recorder.step_num in (skipped, needed)  # it took seconds to begin, and to write

    def finish(recorder: profile) -> None:
        recorder.export_chrome_trace(trace)
        averages = recorder.key_averages()
        print("phases of a step:")
        for name, microseconds in phase_times(averages).items():
            print(f"  {name:<14} {microseconds / 1000 / RECORDED_STEPS:8.2f} ms")
        by = f"self_{'device' if is_cuda else 'cpu'}_time_total"
        print(averages.table(sort_by=by, row_limit=12, max_name_column_width=40))
        if is_cuda:
            torch.cuda.memory._dump_snapshot(str(folder / "memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        print(f"trace of {RECORDED_STEPS} steps: {printable(trace)} (ui.perfetto.dev)")

    if is_cuda:
        # To resolve C++'s frames, too, takes a minute.
        torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python")
    with profile(
        activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * is_cuda,
        schedule=schedule(
            skip_first=skipped, wait=0, warmup=WARMUP_STEPS, active=RECORDED_STEPS, repeat=1
        ),
        on_trace_ready=finish,
        record_shapes=True,
        profile_memory=True,
        with_stack=True,
        acc_events=True,  # otherwise torch 2.11 warns that it would forget earlier recordings
    ) as recorder:
        yield end_step
    gc.collect()  # a trace holds many small objects in cycles


def steps_to_skip(step: int, evaluate_every: int) -> int:
    """Steps before those that are recorded, of a run after `step`: no evaluation is among them.

    Its trace would take minutes to read. Where evaluations are too frequent, some are recorded.
    """
    first = step + SKIPPED_STEPS + WARMUP_STEPS
    evaluation = -(-first // evaluate_every) * evaluate_every  # the next one
    is_free = evaluation >= first + RECORDED_STEPS or evaluate_every <= RECORDED_STEPS
    return SKIPPED_STEPS if is_free else evaluation + 1 - WARMUP_STEPS - step


def phase_times(averages: Iterable[FunctionEventAvg]) -> dict[str, float]:
    """Microseconds of each phase: of its kernels on a GPU; where there are none, of the host."""
    times = {}
    launched = 0.0
    for name in PHASES:
        events = [e for e in averages if e.key == name and e.device_type == DeviceType.CPU]
        on_device = sum(e.device_time_total for e in events)
        times[name] = on_device or sum(e.cpu_time_total for e in events)
        launched += on_device if name != "backward" else 0.0
    kernels = (e for e in averages if e.device_type != DeviceType.CPU and not e.is_user_annotation)
    if total := sum(e.self_device_time_total for e in kernels):
        times["backward"] = total - launched  # a thread of autograd's launches them
    return times
