"""What limits the speed of a run, in one sentence per epoch."""

from ...config import Config
from ...data import TrainData
from ...runtime.machine import num_cores, usual_precision
from ...tracking import Observer, Setup, Speed

LOADING_LIMITS = 0.1  # share of the time spent waiting for images from which on loading is slow
LONG = 600.0  # seconds left of a run, for which another start, and a minute of compiling, may pay


def open_observer(setup: Setup) -> Observer:
    """Judge the speed of each epoch, and give each advice once."""
    given = {""}

    def verdict(speed: Speed) -> str:
        found, advice = find_limit(setup.config, setup.train_data, speed)
        is_new = advice not in given
        given.add(advice)
        return f"{found}. Try {advice}." if is_new else f"{found}."

    return Observer(verdict=verdict)


def find_limit(config: Config, data: TrainData, speed: Speed) -> tuple[str, str]:
    """What limits the speed of training, and which option to try, if any."""
    rate, waited = speed.images_per_second, speed.waited
    if waited > LOADING_LIMITS:
        could = f"while the model could take {rate / (1 - waited):,.0f}"
        return f"Loading is the limit: {rate:,.0f} images/s, {could}", faster_loading(data)
    loading, advice = "", faster_model(config, data, speed)
    if data.where == "stream" and data.loader.num_filled:  # by the workers of one process
        decoded = max(1, data.workers) * data.loader.num_filled / data.loader.busy_seconds
        loading = f", while loading could give {decoded * data.world.size:,.0f}"
    return f"The model is the limit: {rate:,.0f} images/s{loading}", advice


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


def faster_model(config: Config, data: TrainData, speed: Speed) -> str:
    """Options that make the model faster; none for the last minutes of a run."""
    images_left = (data.total_steps - speed.step) * data.batch_size
    if images_left / speed.images_per_second < LONG:
        return ""
    advice, usual = [], usual_precision(data.world.device)
    if data.world.device.type == "cuda" and config.precision == "fp32" != usual:
        advice.append(f"--precision {usual}")
    if not config.compute.channels_last:
        advice.append("--compute.channels-last")
    can_compile = data.world.device.type != "cpu" and config.compute.parallel == "ddp"
    if can_compile and not config.compute.compile:  # which is slower on a CPU
        advice.append("--compute.compile")
    return " or ".join(advice or ["a smaller --model.name or --data.image-size"])
