"""The command that trains a run again, and in what that would differ from the run."""

import re
import shlex
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...checkpoints import read_newest
from ...checkpoints.saving import difference
from ...config import Config, RunConfig
from ...data import are_replaced, open_dataset
from ...errors import UserError
from ...runtime.config_dict import unflatten, words_of
from ...runtime.console import printable
from ...runtime.distributed import World, join_world
from ...runtime.files import read_object
from ...runtime.launch import num_processes
from ...runtime.machine import num_threads
from ...runtime.run_dir import environment
from ...tasks import metric_of
from .config_file import is_of_run, read_knobs
from .presets import again, closest_preset

CPU = re.compile(r"^CPU, \d+ cores$")  # as a device; `threads` tells what results depend on


def reproduce(folder: Path) -> None:
    """Print the command that trains the run in `folder` again, then what differs, a line each.

    Raises:
        UserError: if `folder` has no config.json of a run, or one that needs missing tools.
    """
    path = folder / "config.json"
    knobs = read_knobs(path)
    if not is_of_run(knobs):
        raise UserError(f"{str(path)!a} is not the config of a run: it lacks most options")
    config = unflatten(knobs)
    name, changed = flags_for(config)
    changed |= {"run.dir": f"runs/{again(path)}"}
    print(shlex.join(["python", "train.py", name, *words_of(changed)]), flush=True)
    lines = [*environment_differences(folder, config), *image_differences(folder, config)]
    print("\n".join(["", *map(printable, lines)]) if lines else "\nthe same")


def flags_for(config: Config) -> tuple[str, dict[str, Any]]:
    """The preset and the knobs to set for the `config` of a run, as `settle` left it."""
    usual = replace(config, run=replace(config.run, best_by="auto"))
    is_usual = metric_of(usual) == config.run.best_by  # what `auto` became
    return closest_preset(usual if is_usual else config)


def environment_differences(folder: Path, config: Config) -> list[str]:
    """What the run wrote down of its environment that is not so now; it may be an older one."""
    was: dict[str, Any] = {}
    with suppress(OSError):
        was = read_object(folder / "environment.json")
    if not was:
        return ["environment: not known, as there is no readable environment.json"]
    now = environment_today(config)
    lines = [
        f"{name}: {shown(now[name])} now, {shown(was[name])} in the run"
        for name in now
        if name in was and kind_of(was[name]) != kind_of(now[name])
    ]
    if now["changed"] and now["changed"] == was.get("changed"):
        lines.append(f"changed: no commit has these files as they were: {shown(now['changed'])}")
    return lines


def kind_of(value: object) -> object:
    """A CPU without its cores, of which a run beside others has a part; and all else as it is."""
    return CPU.sub("CPU", value) if isinstance(value, str) else value


def environment_today(config: Config) -> dict[str, Any]:
    """What a run of `config` would write down as its environment on this machine."""
    device = config.compute.device
    compute = replace(config.compute, device="cpu" if device == "cpu" else "auto")  # any GPU
    with join_world(compute) as world:
        processes = num_processes(config.run, compute)
        return environment(world) | {"processes": processes, "threads": num_threads(processes)}


def shown(value: object) -> str:
    """A value of environment.json in one line."""
    return "; ".join(str(value).splitlines()) if value else "none"


def image_differences(folder: Path, config: Config) -> list[str]:
    """Whether the training images are other than those that the newest checkpoint names."""
    try:
        saved = read_newest(RunConfig(dir=str(folder)), World(torch.device("cpu")))
        if saved is None:
            return ["images: not known, as there is no checkpoint"]
        source = open_dataset(config.data, "train").fitted(config.model.task, "train")
    except UserError as error:
        return [f"images: {error}"]
    if saved["classes"] != list(source.classes):
        return ["images: their classes have changed"]
    if saved["fingerprint"] != source.fingerprint():
        return [f"images: {difference(saved['fingerprint'], source.fingerprint())}"]
    if are_replaced(saved["files"], source.file_digests):
        return ["images: training images were replaced under the same names"]
    return []
