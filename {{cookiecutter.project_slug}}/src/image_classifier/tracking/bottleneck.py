"""What limits the speed of a run, in one sentence per epoch."""

from ..config import Config
from ..data import TrainData
from ..runtime.machine import num_cores, usual_precision

LOADING_LIMITS = 0.1  # share of the time spent waiting for images from which on loading is slow


def verdict(config: Config, data: TrainData, rate: float, waited: float) -> str:
    """What limits the speed of training, and which option to try.

    Args:
        config: of the run.
        data: the training images, with what is known of their workers.
        rate: training images per second.
        waited: share of the time in which the loop waited for images, 0 to 1.
    """
    if waited > LOADING_LIMITS:
        return (
            f"Loading is the limit: {rate:,.0f} images/s, while the model could take "
            f"{rate / (1 - waited):,.0f}. Try {faster_loading(data)}."
        )
    loading = ""
    if data.ceiling:  # of the workers of one process
        loading = f", while loading could give {data.ceiling * data.world.size:,.0f}"
    advice = faster_model(config, data)
    return f"The model is the limit: {rate:,.0f} images/s{loading}. Try {advice}."


def faster_loading(data: TrainData) -> str:
    """Options that make loading faster."""
    if data.where != "stream":
        return "less of --augment"
    cores = num_cores() // data.world.local_size
    advice = []
    if data.source.paths is not None and not data.source.recipe:
        advice.append("`prepare`, which stores the images smaller")
    if data.workers < cores:
        advice.append(f"--data.workers {cores} (now {data.workers})")
    return " or ".join(advice or ["more CPU cores, or a smaller --data.image-size"])


def faster_model(config: Config, data: TrainData) -> str:
    """Options that make the model faster."""
    advice, usual = [], usual_precision(data.world.device)
    if data.world.device.type == "cuda" and config.precision == "fp32" != usual:
        advice.append(f"--precision {usual}")
    if not config.compute.channels_last:
        advice.append("--compute.channels-last")
    if not config.compute.compile:
        advice.append("--compute.compile")
    return " or ".join(advice or ["a smaller --model.name or --data.image-size"])
