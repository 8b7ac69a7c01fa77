"""`ray-train`: train in the workers of a Ray cluster."""

from dataclasses import dataclass

from ...config import Config
from ...errors import UserError
from ...extensions import within
from ...runtime.command_line import command, parse, summary, take_preset
from ...runtime.config_dict import sections
from ...runtime.launch import MAX_RESTARTS
from ...runtime.platform import install_command
from .cluster import prepare_ray

RESULT_IS_IN_FILES = True


@dataclass(frozen=True)
class RayTrainOptions(Config):
    """Which workers to ask Ray for, and every knob of training."""

    workers: int = within(2, 1, 4096)  # processes, each with a GPU if the cluster has any
    cpus_per_worker: int = within(0, 0, 4096)  # cores for each worker; 0: those of this machine,
    # divided by the workers
    max_failures: int = within(MAX_RESTARTS, 0)  # restarts after a worker was lost, each from the
    # last checkpoint
    address: str = "local"  # local: start Ray on this machine, for this run; auto: the cluster that
    # runs here; or HOST:PORT


def main(words: list[str]) -> int:
    """Train in the workers of a Ray cluster: `ray-train [PRESET] [--FLAG VALUE ...]`."""
    name, preset = take_preset(words, "shapes", "runs/{}")
    prog = f"{command('ray-train')} {name}"
    default = RayTrainOptions(**sections(preset))
    options = parse(RayTrainOptions, words, prog=prog, about=summary(main), default=default)
    if options.run.processes not in ("auto", options.workers):
        raise UserError(f"--run.processes {options.run.processes}: here it is --workers")
    if options.address == "local":
        prepare_ray({"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0"})
    try:
        from .ray_train import ray_train
    except ImportError as error:
        install = install_command("ray[train]>=2.60")
        raise UserError(f"ray-train needs a library ({error.name}): {install}") from error
    config = Config(**sections(options))
    return ray_train(
        config, options.workers, options.cpus_per_worker, options.max_failures, options.address
    )
