"""Training steps with more and more images at once: what they take of memory and time.

The images are there already: neither loading nor augmentation is measured. On a GPU sizes grow
until memory runs out. On a CPU they stop before that, by the growth so far: there the largest size
matters less than the fastest, whose activations still fit into the caches.
"""

import gc
import math
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from time import perf_counter
from types import ModuleType

import torch
from torch import Tensor
from torch.amp import GradScaler

from ...config import Config
from ...data import Augmented, TrainData
from ...errors import FaultError, UserError
from ...extensions import find_tool
from ...runtime.distributed import World, join_world
from ...runtime.files import write_json, write_text
from ...runtime.launch import is_launched
from ...runtime.machine import device_name, host_memory_bytes
from ...runtime.out_of_memory import is_out_of_memory
from ...runtime.platform import hand_back_memory, peak_memory_bytes
from ...runtime.run_dir import open_run
from ...runtime.seeding import seed_everything
from ...settle import settle
from ...train import Training, train_step

GOOD_ENOUGH = 0.95  # of the highest rate
FINENESS = 8  # the largest size that fits is found to within this part of it
SAFE_SHARE = 0.9  # of main memory, which ends the process where it runs out
SLOW_SECONDS = 10.0  # larger sizes than one whose step takes longer are not tried
# How much is timed of each size, at least. The fastest step counts: during others the machine did
# something else, too.
MIN_STEPS, ROUND_SECONDS = 3, 0.5
DISTINCT = 64  # images that are repeated to fill a micro-batch

ByCommand = Callable[..., str]  # from knobs to the command line that trains with them


@dataclass(frozen=True)
class Size:
    """What was measured of one size of a micro-batch."""

    images: int
    images_per_second: float
    peak_bytes: int  # of memory in a step

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.images / self.images_per_second


class Trial:
    """A model in training, for steps on micro-batches of any size."""

    def __init__(self, config: Config, world: World, data: TrainData) -> None:
        """Build what `config` says."""
        self.device = world.device
        seed_everything(config.seed, config.deterministic, world.device)
        self.training = Training(config, world, data, config.data.batch_size)
        self.training.begin()
        pixels = data.sample(min(DISTINCT, config.data.batch_size))
        self.images = self.training.normalize(pixels)
        self.labels = data.source.labels[: len(pixels)].to(world.device)
        self.sizes: dict[int, Size] = {}  # that fit, by their images
        self.forget_peak()
        self.total_bytes = self.total_memory()

    def total_memory(self) -> int:
        """The memory that this process can have."""
        if self.device.type != "cuda":
            return int(SAFE_SHARE * (peak_memory_bytes() + host_memory_bytes()))
        free, _ = torch.cuda.mem_get_info(self.device)
        return free + torch.cuda.memory_reserved(self.device)

    def forget_peak(self) -> None:
        """Free what is not in use, and let the peak count from here."""
        self.training.state.optimizer.zero_grad()
        if self.training.config.compute.compile:
            torch.compiler.reset()  # it compiles for 8 sizes, and runs others as they are
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            hand_back_memory()
            with suppress(OSError):  # only Linux can
                Path("/proc/self/clear_refs").write_text("5")

    def in_order(self) -> list[Size]:
        """All sizes that fit, the smallest first."""
        return sorted(self.sizes.values(), key=lambda size: size.images)

    def fits(self, count: int) -> bool:
        """Whether memory suffices for `count` images, which are measured if so."""
        if count in self.sizes:
            return True
        if self.device.type != "cuda" and expected_bytes(self.in_order(), count) > self.total_bytes:
            return False
        if size := self.measure(count):
            self.sizes[count] = size
            rate = f"{size.images_per_second:,.0f}"
            memory = gigabytes(size.peak_bytes)
            print(f"{count:8,} images {rate:>10} images/s {memory:>12}", flush=True)
        return size is not None

    def measure(self, count: int) -> Size | None:
        """Train on `count` images for a few steps; None if memory does not suffice."""
        self.forget_peak()
        try:
            seconds = self.times(count)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self.forget_step()
            return None
        on_gpu = self.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(self.device) if on_gpu else peak_memory_bytes()
        return Size(count, count / min(seconds), peak)

    def forget_step(self) -> None:
        """Forget the half of a step that failed, which optimizer and scaler may remember."""
        training = self.training
        if training.config.optim.name != "sgd":  # which has all of its state from the start
            training.state.optimizer.state.clear()
        is_scaled = training.precision.scaler.is_enabled()
        training.precision.scaler = GradScaler(self.device.type, enabled=is_scaled)
        for name in ("grad_scale", "found_inf"):  # which the scaler leaves in the optimizer
            vars(training.state.optimizer).pop(name, None)

    def times(self, count: int) -> list[float]:
        """Seconds of each step, after two that warm up."""
        repeats = math.ceil(count / len(self.images))
        layout = self.training.state.precision.memory_format
        images = self.images.repeat(repeats, 1, 1, 1)[:count].contiguous(memory_format=layout)
        labels = torch.cat([self.labels] * repeats)[:count]
        seconds: list[float] = []
        while sum(seconds[2:]) < ROUND_SECONDS or len(seconds) < 2 + MIN_STEPS:
            began = perf_counter()
            self.step(images, labels)
            if self.device.type != "cpu":
                torch.accelerator.synchronize(self.device)
            seconds.append(perf_counter() - began)
            if seconds[-1] > SLOW_SECONDS:
                break
        return seconds[2:] or seconds

    def step(self, images: Tensor, labels: Tensor) -> None:
        """One step of training, which changes no weight: the learning rate is 0."""
        training = self.training
        state = self.training.state
        for group in state.optimizer.param_groups:
            group["lr"] = 0.0
        how = training.loss_fn, state.precision, len(images)
        train_step(training.ddp_model, Augmented(images, labels), *how)
        state.precision.step(state.optimizer)
        state.advance()


@dataclass(frozen=True)
class Found:
    """The result: all sizes that fit, in order, and why there is no larger one."""

    sizes: list[Size]
    total_bytes: int
    limit: str  # memory, or what else ended the search
    configured: int  # images at once, as `--data.batch-size` and `--optim.accumulate` say
    # Peak of fp32 at that size, and at twice that; 0: unknown, or the format is fp32.
    fp32_bytes: tuple[float, float] = (0, 0)

    @property
    def largest(self) -> Size:
        """The largest size that fits."""
        return self.sizes[-1]

    @property
    def enough(self) -> Size:
        """The smallest size that is nearly as fast as any."""
        best = max(size.images_per_second for size in self.sizes)
        return next(s for s in self.sizes if s.images_per_second >= GOOD_ENOUGH * best)

    @property
    def ratio(self) -> int:
        """How many times the configured size is not less than that."""
        return -(-self.enough.images // self.configured)


def expected_bytes(sizes: list[Size], images: int) -> float:
    """The peak of more images, by the growth between the largest two sizes; 0: unknown."""
    if len(sizes) < 2:
        return 0
    first, last = sizes[-2:]
    growth = (last.peak_bytes - first.peak_bytes) / (last.images - first.images)
    return last.peak_bytes + max(0, growth) * (images - last.images)


def find_batch(config: Config, training: ByCommand, at_most: int, processes: int) -> Found:
    """Try sizes of micro-batches, and write `batch.json` to the run folder.

    With the tool `report` also `batch.html`, with charts.
    Prints the table, what follows from it, and the command line to try, which `training` makes of
    changed knobs. A run has `processes`; one is measured.

    Raises:
        UserError: if the config, the data or the folder is unusable, or torchrun started this.
        FaultError: if not even one image fits.
    """
    if is_launched():
        raise UserError("find-batch measures one process: start it without torchrun")
    folder = Path(config.run.dir)
    with join_world(config.compute, config.run.timeout_seconds) as world, open_run(config, world):
        one = replace(config.data, workers=0, prefetch_batches=1)
        one = replace(one, batch_size=config.data.batch_size // processes)
        config = replace(config, data=one)
        with closing(TrainData(config, world)) as data:
            config, why = settle(config, data, world)
            print(
                f"{config.model.name} at {one.image_size} pixels, {config.precision} ({why}), "
                f"{device_name(world.device)}, one process",
                flush=True,
            )
            found = search(config, world, data, at_most or max(1, len(data) // processes))
        text = conclude(found, config, training, processes)
        about = asdict(found) | {"precision": config.precision, "device": device_name(world.device)}
        write_json(folder / "batch.json", about | {"largest": found.largest.images, "text": text})
        charts = find_tool("charts", "report")
        if charts is not None:
            write_text(folder / "batch.html", page(found, text, charts))
        files = f"{'batch.html and ' if charts else ''}batch.json"
        print("\n".join([f"written: {folder}/{files}", *text]))
    return found


def search(config: Config, world: World, data: TrainData, at_most: int) -> Found:
    """Measure growing sizes until memory ends, and the configured size in fp32, too.

    Raises:
        FaultError: if not even one image fits.
    """
    trial = Trial(config, world, data)
    limit = grow(trial, at_most)
    if not trial.sizes:
        raise FaultError(
            "not even one image at a time fits; a smaller --data.image-size or --model.name, "
            "or --data.where host, needs less"
        )
    configured = config.data.batch_size // config.optim.accumulate
    found = Found(trial.in_order(), trial.total_bytes, limit, configured)
    # The knee of the curve, and what the user has, are seldom powers of two.
    # The largest that fits is known to an eighth.
    reach = min(at_most, found.largest.images * (1 + (limit == "memory") / FINENESS))
    for images in (found.enough.images * 3 // 4, configured, found.ratio * configured):
        if 0 < images <= reach:
            trial.fits(images)
    found = replace(found, sizes=trial.in_order())
    if config.precision == "fp32" or configured not in trial.sizes:
        return found
    del trial  # which makes room
    return replace(found, fp32_bytes=bytes_in_fp32(config, world, data, configured))


def grow(trial: Trial, at_most: int) -> str:
    """Double the size, then halve the steps to the largest; the reason why there is no larger."""
    good = 0
    bad = min(2, at_most)
    while trial.fits(bad):
        good = bad
        bad = min(2 * bad, at_most)
        if good == at_most:
            return f"more than {at_most:,} were not tried"
        if trial.sizes[good].seconds > SLOW_SECONDS:
            return f"a larger one takes more than {SLOW_SECONDS:g} s per step"
    while bad - good > max(1, good // FINENESS):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if trial.fits(middle) else (good, middle)
    return "memory"


def bytes_in_fp32(
    config: Config, world: World, data: TrainData, images: int
) -> tuple[float, float]:
    """The peak of fp32 with so many images, and with twice as many; by growth if it has no room."""
    print("in fp32:", flush=True)
    trial = Trial(replace(config, precision="fp32"), world, data)
    for count in sorted({2, max(2, images // 2), images}):
        trial.fits(count)
    sizes = trial.in_order()
    return expected_bytes(sizes, images), expected_bytes(sizes, 2 * images)


def conclude(found: Found, config: Config, training: ByCommand, processes: int) -> list[str]:
    """What follows, in sentences; the last has a command line to try."""
    largest = found.largest
    enough = found.enough
    share = config.data.batch_size
    total = gigabytes(found.total_bytes)
    memory = gigabytes(largest.peak_bytes)
    text = [
        f"largest micro-batch that fits: {largest.images:,} images ({memory} of {total}); "
        f"limit: {found.limit}",
        f"smallest within {1 - GOOD_ENOUGH:.0%} of the best images/s: {enough.images:,} images; "
        "larger ones buy no speed here",
    ]
    says = f"--data.batch-size {share * processes}, {found.configured:,} images at once,"
    here = next((size for size in found.sizes if size.images == found.configured), None)
    if here is None and found.limit != "memory":
        return [*text, f"{says} was not tried", f"try: {training()} (as it is)"]
    if here is None:
        parts = (n for n in range(1, share + 1) if share % n == 0 and share // n <= largest.images)
        line = training(optim__accumulate=next(parts))
        return [*text, f"{says} does not fit", f"try: {line} (the same batch in smaller parts)"]
    is_tried = largest.images >= 2 * here.images
    has_room = is_tried or expected_bytes(found.sizes, 2 * here.images) <= found.total_bytes
    could = "you could take twice the batch" if has_room else "twice the batch does not fit"
    text.append(f"{says} takes {gigabytes(here.peak_bytes)} of {total}: {could}")
    fp32, twice_in_fp32 = found.fp32_bytes
    if fp32:
        makes_room = has_room and twice_in_fp32 > found.total_bytes
        made = f": {config.precision} makes the room for twice the batch" * makes_room
        text.append(f"in fp32 it would take {gigabytes(fp32)}{made}")
    return [*text, advise(found, config, training, processes)]


def advise(found: Found, config: Config, training: ByCommand, processes: int) -> str:
    """The command line to try where the configured size fits."""
    optim = config.optim
    share = config.data.batch_size
    if optim.accumulate > 1 and found.largest.images >= share:
        return f"try: {training(optim__accumulate=1)} (the whole batch fits at once)"
    enough = found.enough.images
    rates = {size.images: size.images_per_second for size in found.sizes}
    ratio = found.ratio
    if rates.get(ratio * found.configured, 0) <= rates[found.configured]:  # or does not fit
        ratio = enough // found.configured
    if ratio < 2:
        if enough <= found.configured:
            return f"a larger batch buys no speed: {training()}"
        why = "do not fit" if found.limit == "memory" else "were not tried"
        why = "are no faster" if 2 * found.configured in rates else why
        return f"a somewhat larger batch is faster, but twice as many {why}: {training()}"
    if optim.accumulate > 1:
        parts = range(-(-optim.accumulate // ratio), optim.accumulate)
        if fewer := next((n for n in parts if share % n == 0), 0):
            return f"try: {training(optim__accumulate=fewer)} (larger parts are faster)"
        return f"larger parts would be faster, but none of them divides the batch: {training()}"
    scale, rule = (ratio, "linear") if optim.name == "sgd" else (ratio**0.5, "square-root")
    batch = ratio * share * processes
    lr = float(f"{optim.lr * scale:.2g}")
    return (
        f"try: {training(data__batch_size=batch, optim__lr=lr)} ({rule} scaling of the learning "
        "rate is a start, not a rule, and fewer steps learn differently: see find-lr and compare)"
    )


def gigabytes(count: float) -> str:
    """Bytes for a reader: `11.2 GB`, `0.42 GB`."""
    return f"{count / 2**30:.3g} GB"


def page(found: Found, text: list[str], draw: ModuleType) -> str:
    """Images per second and memory over the size, and what follows, as an HTML page."""
    rates = [(size.images, size.images_per_second) for size in found.sizes]
    memory = [(size.images, size.peak_bytes / 2**30) for size in found.sizes]
    label = "images in a micro-batch"
    charts = draw.line_chart("images per second", {"": rates}, low=0, x_label=label, is_log=True)
    charts += draw.line_chart("memory", {"": memory}, unit=" GB", low=0, x_label=label, is_log=True)
    rows = "".join(
        f'<tr><td class="number">{size.images:,}</td>'
        f'<td class="number">{size.images_per_second:,.0f}</td>'
        f'<td class="number">{gigabytes(size.peak_bytes)}</td></tr>'
        for size in found.sizes
    )
    heads = "".join(f'<th class="number">{head}</th>' for head in ("images", "images/s", "memory"))
    notes = "".join(f"<p>{escape(line)}</p>" for line in text)
    body = f'<h1>Batch size</h1>{notes}<div class="charts">{charts}</div>'
    body += f"<table><thead><tr>{heads}</tr></thead>{rows}</table>"
    return draw.PAGE.substitute(title="Batch size", body=body)
