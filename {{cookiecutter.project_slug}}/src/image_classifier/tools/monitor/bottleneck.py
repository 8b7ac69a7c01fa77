"""What limits the speed of a run, in one sentence per epoch."""

import math
from collections.abc import Callable

import torch

from ...config import Config
from ...data import TrainData
from ...extensions import option
from ...runtime.machine import device_memory_bytes, num_cores, usual_precision
from ...tracking import Speed
from .gpu import Gpus

LOADING_LIMITS = 0.1  # share of the time spent waiting for images from which on loading is slow
LONG = 600.0  # seconds left of a run, for which another start, and a minute of compiling, may pay
LAUNCHING_LIMITS = 0.5  # GPU utilization below which the host does not launch kernels fast enough
BUSY = 0.9  # GPU utilization from which on the GPU is the limit, whatever its host waits for
READING_SECONDS = 1.0  # before a reading of the utilization, of which it is the mean, at most


def open_judge(config: Config, data: TrainData, gpus: Gpus) -> Callable[[Speed], str]:
    """Judge the speed of each epoch, and give each advice once."""
    given = {""}

    def judge(speed: Speed) -> str:
        found, advice = find_limit(config, data, gpus, speed)
        is_new = advice not in given
        given.add(advice)
        return f"{found}. Try {advice}." if is_new else f"{found}."

    return judge


def find_limit(config: Config, data: TrainData, gpus: Gpus, speed: Speed) -> tuple[str, str]:
    """What limits the speed of training, and which option to try, if any."""
    rate = speed.images_per_second
    waited = speed.waited
    device = data.world.device
    is_long = (data.total_steps - speed.step) * data.batch_size / rate >= LONG
    utilization = math.nan
    # In shorter epochs an evaluation may be in the reading.
    if device.type == "cuda" and data.steps_per_epoch * data.batch_size / rate > READING_SECONDS:
        utilization = gpus.utilization()
    if waited > LOADING_LIMITS and not utilization >= BUSY:
        could = f"while the model could take {rate / (1 - waited):,.0f}"
        return f"Loading is the limit: {rate:,.0f} images/s, {could}", faster_loading(data)
    if utilization < LAUNCHING_LIMITS:
        found = f"{rate:,.0f} images/s, GPU utilization {utilization:.0%}"
        advice = less_overhead(config, device) if is_long else ""
        return f"Kernel launch overhead is the limit: {found}", advice
    loading = ""
    advice = faster_model(config, data) if is_long else ""
    if data.where == "stream" and data.loader.num_filled:  # by the workers of one process
        decoded = max(1, data.workers) * data.loader.num_filled / data.loader.busy_seconds
        loading = f", while loading could give {decoded * data.world.size:,.0f}"
    return f"The model is the limit: {rate:,.0f} images/s{loading}", advice


def less_overhead(config: Config, device: torch.device) -> str:
    """Options that keep a GPU busy for longer with each kernel, or launch fewer of them."""
    advice = []
    activations = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    if device_memory_bytes(device) > 2 * activations:
        advice.append("a larger --data.batch-size")
    if may_compile(config, device):
        advice.append("--compute.compile")
    return " or ".join(advice or ["a CPU with faster cores"])


def may_compile(config: Config, device: torch.device) -> bool:
    """Whether compiling may gain: not on a CPU, where it is slower, and not with FSDP."""
    parallel = option(config, "compute.parallel", "ddp")
    return device.type != "cpu" and parallel == "ddp" and not config.compute.compile


def faster_loading(data: TrainData) -> str:
    """Options that make loading faster."""
    if data.where != "stream":
        return "a smaller --data.image-size"
    cores = num_cores() // data.world.local_size
    advice = []
    if data.source.paths is not None and not data.source.recipe:
        advice.append("`prepare` (smaller images)")
    if data.workers < cores:
        advice.append(f"--data.workers {cores} (now {data.workers})")
    return " or ".join(advice or ["more CPU cores, or a smaller --data.image-size"])


def faster_model(config: Config, data: TrainData) -> str:
    """Options that make the model faster."""
    advice = []
    usual = usual_precision(data.world.device)
    if data.world.device.type == "cuda" and config.precision == "fp32" != usual:
        advice.append(f"--precision {usual}")
    if not config.compute.channels_last:
        advice.append("--compute.channels-last")
    if may_compile(config, data.world.device):
        advice.append("--compute.compile")
    return " or ".join(advice or ["a smaller --model.name or --data.image-size"])
