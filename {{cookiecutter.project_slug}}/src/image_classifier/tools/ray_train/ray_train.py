"""A run under Ray Train's `TorchTrainer`: Ray starts the workers, and restarts them if one is lost.

Ray runs `train_in_worker` in each of them, and that is `train`, with its own checkpoints.
"""

import logging
import os
import socket
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import (
    FailureConfig,
    LoggingConfig,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    get_context,
)
from ray.train.backend import Backend
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2.api.callback import UserCallback

from ...config import Config
from ...errors import EXIT_FAULT, EXIT_OUT_OF_MEMORY, EXIT_PEER_LOST, FaultError, UserError
from ...runtime.console import first_line, printable
from ...runtime.distributed import World
from ...runtime.launch import attempt, seconds_since_start
from ...runtime.machine import num_cores
from ...runtime.run_dir import clear_run, open_run
from ...train import train
from . import watcher
from .cluster import start_ray

STORAGE = "ray"  # folder in the run folder, of what Ray writes


class Ranks(Backend):
    """Tells each worker what torchrun would tell it; `join_world` makes the process group of that.

    Ray's own group would open a port to the network on a single machine, too.
    """

    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, _: TorchConfig) -> None:  # noqa: ANN401 - Ray's
        """Before each start of training."""
        job = worker_group.execute_single(0, meeting_place)
        worker_group.execute(tell_rank, job)


@dataclass
class RanksConfig(TorchConfig):
    """`TorchTrainer` with `Ranks`."""

    @property
    def backend_cls(self) -> type[Backend]:
        """What starts the workers."""
        return Ranks


class Losses(UserCallback):
    """Prints which workers were lost, and why; Ray then starts all of them again."""

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:  # noqa: ANN401, ARG002
        """After workers raised or died."""
        for rank, error in worker_exceptions.items():
            print(f"the worker of rank {rank} was lost: {first_line(error)}", flush=True)


def meeting_place() -> dict[str, str]:
    """Where the ranks find each other: an address and a free port of this node; a name."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    place = {"MASTER_ADDR": ray.util.get_node_ip_address(), "MASTER_PORT": port}
    return place | {"TORCHELASTIC_RUN_ID": uuid.uuid4().hex}


def tell_rank(job: dict[str, str]) -> None:
    """Put into the environment which of the workers this one is."""
    rank = get_context()
    os.environ |= job | {
        "RANK": str(rank.get_world_rank()),
        "WORLD_SIZE": str(rank.get_world_size()),
        "LOCAL_RANK": str(rank.get_local_rank()),
        "LOCAL_WORLD_SIZE": str(rank.get_local_world_size()),
    }


def ray_train(
    config: Config, workers: int, cpus_per_worker: int, max_failures: int, address: str
) -> int:
    """Train as `config` says in so many workers of Ray, and return the exit code.

    The exit code is 1 if workers were lost more than `max_failures` times.

    Raises:
        UserError: if there is no such cluster, or as `train` does.
    """
    cores = cpus_per_worker or max(1, num_cores() // workers)
    try:
        start(address, cores * workers)
        count = ray.cluster_resources().get("GPU", 0)
        has_gpus = config.compute.device != "cpu" and count > 0
        if has_gpus and address == "local" and workers > count:  # Ray would wait for more, for ever
            raise UserError(
                f"--workers {workers} need as many GPUs; there are {count:g}: --workers {count:g}, "
                "or --compute.device cpu"
            )
        with open_run(config, alone := World(torch.device("cpu"))):
            if config.run.fresh:  # here, as workers that are restarted must resume
                clear_run(Path(config.run.dir), alone)
        config = replace(config, run=replace(config.run, fresh=False))
        trainer = TorchTrainer(
            train_in_worker,
            train_loop_config={"config": config, "folder": os.getcwd()},
            torch_config=RanksConfig(),
            scaling_config=ScalingConfig(
                num_workers=workers, use_gpu=has_gpus, resources_per_worker={"CPU": cores}
            ),
            run_config=RunConfig(
                name=STORAGE,
                storage_path=str(Path(config.run.dir).resolve()),
                logging_config=LoggingConfig(log_level="ERROR"),
                failure_config=FailureConfig(max_failures=max_failures),
                callbacks=[Losses()],
            ),
        )
        result = trainer.fit()
    except TrainingFailedError as error:
        print(f"{first_line(error)}: --max-failures {max_failures}. What was saved is kept")
        return EXIT_FAULT
    except FaultError as error:
        print(error)
        return EXIT_FAULT
    except SystemExit:  # how Ray ends after Ctrl-C
        raise KeyboardInterrupt from None
    finally:
        ray.shutdown()
    if isinstance(result.return_value, str):
        raise UserError(result.return_value)
    return result.return_value


def start(address: str, cores: int) -> None:
    """Connect to a cluster, or start Ray on this machine, without a port that others reach.

    Raises:
        UserError: if there is no cluster at `address`.
        FaultError: if Ray does not start on this machine.
    """
    # Of Ray's output only errors; its own handlers print each line twice, and each report.
    for handler in ("PRINT_PATCH", "WORKER_STRUCTURED_LOGGING"):
        os.environ[f"RAY_TRAIN_ENABLE_{handler}"] = "0"
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")  # takes one report each time
    # The folder of the package; on other machines of a cluster it is there too, or installed.
    paths = [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    options: dict[str, Any] = {
        "runtime_env": {"env_vars": variables},
        "logging_level": logging.ERROR,
        "logging_config": ray.LoggingConfig(log_level="ERROR"),
    }
    if address == "local":
        # The dashboard's server, which one of Ray's actors asks every second: nobody.
        variables["RAY_API_SERVER_ADDRESS"] = "http://127.0.0.1:0"
        start_ray(cores, **options)
        return
    try:
        ray.init(address, **options)
    except ConnectionError as error:
        raise UserError(f"--address {address}: {first_line(error)}") from error


def train_in_worker(job: dict[str, Any]) -> int | str:
    """Train as one rank, and return the exit code, or a user's mistake; the driver gets rank 0's.

    Ray starts all ranks again if one raises.

    Raises:
        RuntimeError: if another start may help.
    """
    seconds_since_start()  # which begins here, for a time limit
    watcher.is_worker = True
    os.chdir(job["folder"])  # Ray has changed it
    try:
        code = attempt(lambda: train(job["config"]))
    except UserError as mistake:
        if get_context().get_world_rank():  # perhaps only this node has no such folder
            print(f"rank {get_context().get_world_rank()}: {printable(str(mistake))}")
        return str(mistake)
    if code in (EXIT_PEER_LOST, EXIT_OUT_OF_MEMORY):
        raise RuntimeError(f"exit code {code}: start again, from the last checkpoint")
    return code
