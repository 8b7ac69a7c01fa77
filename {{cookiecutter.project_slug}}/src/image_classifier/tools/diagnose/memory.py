"""At each time that memory runs out: an account of what takes it and, on a GPU, a snapshot.

To read a snapshot: https://docs.pytorch.org/memory_viz; with `--profile`, it also has the lines of
Python that allocated, in the steps that are recorded.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ...checkpoints import TrainState
from ...extensions import option
from ...runtime.console import printable
from ...runtime.distributed import local_part
from ...runtime.files import write_json
from ...runtime.out_of_memory import is_out_of_memory
from ...runtime.platform import peak_memory_bytes
from ...tracking import Setup

FOLDER = "memory"  # in the run folder
# What to try where weights, gradients and the optimizer take most; and where activations do.
SMALLER = "a smaller --model.name needs less"
RECOMPUTE = "--compute.gradient-checkpointing recomputes most activations"


@contextmanager
def watch(setup: Setup, state: TrainState) -> Iterator[None]:
    """A block whose lack of memory, at any step and on any rank, is accounted for in a file."""
    try:
        yield
    except Exception as error:
        reason = error.__cause__ or error
        if is_out_of_memory(reason):
            with suppress(Exception):  # which would hide that memory ran out
                write_account(setup, state, str(reason))
        raise


def write_account(setup: Setup, state: TrainState, message: str) -> None:
    """Write where the memory is, and print what takes most; nothing is allocated on the device."""
    config = setup.config
    world = setup.world
    micro_batch = setup.val_data.batch_size  # evaluation takes as many images at once
    name = f"step_{state.step + 1:08}_micro_{micro_batch}_rank{world.rank}"
    folder = Path(config.run.dir, FOLDER)
    folder.mkdir(exist_ok=True)
    names = chain([name], (f"{name}_{number}" for number in count(2)))
    path = next(path for path in (folder / f"{name}.json" for name in names) if not path.exists())
    taken = bytes_by_part(setup, state)
    device = device_account(world.device)
    rest = "activations" if world.device.type == "cuda" else "activations and program"
    taken[rest] = max(0, device["peak"] - sum(taken.values()))
    asked = re.search(r"Tried to allocate ([\d.]+ \w+)", message)
    about = {"step": state.step + 1, "micro_batch": micro_batch, "rank": world.rank}
    about |= {"asked_for": asked and asked[1], "message": message}
    write_json(path, about | {"bytes": taken, "device": device})
    most = max(taken, key=taken.__getitem__)
    advice = {rest: RECOMPUTE, "images": "--data.where host"}.get(most, SMALLER)
    if most == rest and option(config, "compute.gradient_checkpointing", True):
        advice = f"a smaller --data.image-size or {SMALLER[2:]}"
    size = taken[most] / 2**30
    peak = device["peak"] / 2**30
    print(
        f"memory when it ran out: {printable(str(path))}; {most} take most, {size:.3g} of "
        f"{peak:.3g} GB: {advice}",
        flush=True,
    )
    if world.device.type == "cuda":
        torch.cuda.memory._dump_snapshot(str(path.with_suffix(".pickle")))


def bytes_by_part(setup: Setup, state: TrainState) -> dict[str, int]:
    """What takes memory of the device from step to step."""
    model = state.model
    ema = state.ema
    data = (setup.train_data, setup.val_data)
    weights = list(model.parameters())
    parts: dict[str, Iterable[Any]] = {
        "weights": chain(weights, model.buffers()),
        "gradients": (weight.grad for weight in weights),
        "optimizer": tree_leaves(list(state.optimizer.state.values())),
        "averaged weights": chain(ema.parameters(), ema.buffers()) if ema is not None else (),
        "images": (getattr(part, name, None) for part in data for name in ("pixels", "labels")),
    }
    device = setup.world.device.type
    return {
        name: sum(
            local_part(t).nbytes for t in part if isinstance(t, Tensor) and t.device.type == device
        )
        for name, part in parts.items()
    }


def device_account(device: torch.device) -> dict[str, int]:
    """Bytes as the allocator counts them; on a CPU, the most that the whole process took."""
    if device.type != "cuda":
        return {"peak": peak_memory_bytes()}
    free, total = torch.cuda.mem_get_info(device)
    return {
        "peak": torch.cuda.max_memory_allocated(device),
        "allocated": torch.cuda.memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "free": free,
        "total": total,
    }
