"""Training steps with more and more images at once: what they take of memory and time.

The images are there already: neither loading nor augmentation is measured. On a GPU sizes grow
until memory runs out. On a CPU they stop before that, by the growth so far: there the largest size
matters less than the fastest, whose activations still fit into the caches.
"""

import gc
import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from ...config import Config
from ...data import TrainData
from ...errors import FaultError, UserError
from ...precision import settle_precision
from ...runtime.distributed import World, join_world
from ...runtime.files import write_json, write_text
from ...runtime.machine import device_name, host_memory_bytes
from ...runtime.platform import forget_peak_memory, hand_back_memory, peak_memory_bytes
from ...runtime.run_dir import open_run
from ...train import train_step
from ..html import PAGE, line_chart
from ..training import Training

GOOD_ENOUGH = 0.95  # of the highest rate
FINENESS = 8  # the largest size that fits is found to within this part of it
SAFE_SHARE = 0.9  # of main memory, which ends the process where it runs out
SLOW_SECONDS = 10.0  # larger sizes than one whose step takes longer are not tried
STEPS, ROUND_SECONDS = (3, 50), 0.5  # timed steps, fewest and most, and how long at least
DISTINCT = 64  # images that are repeated to fill a micro-batch

ByCommand = Callable[..., str]  # from knobs to the command line that trains with them


@dataclass(frozen=True)
class Size:
    """What was measured of one size of a micro-batch."""

    images: int
    images_per_second: float
    peak_bytes: int  # of memory in a step


class Trial:
    """A model in training, for steps on micro-batches of any size."""

    def __init__(self, config: Config, world: World, data: TrainData) -> None:
        """Build what `config` says."""
        self.device, self.training = world.device, Training(config, world, data)
        pixels = data.sample(min(DISTINCT, config.data.batch_size))
        self.images = self.training.normalize(pixels)
        self.labels = torch.arange(len(pixels), device=world.device) % data.num_classes
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
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            hand_back_memory()
            forget_peak_memory()

    def measure(self, count: int) -> Size | None:
        """Train on `count` images for a few steps; None if memory does not suffice."""
        self.forget_peak()
        try:
            seconds = self.times(count)
        except torch.OutOfMemoryError:
            return None
        on_gpu = self.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(self.device) if on_gpu else peak_memory_bytes()
        return Size(count, count / median(seconds), peak)

    def times(self, count: int) -> list[float]:
        """Seconds of each step, after two that warm up."""
        repeats = math.ceil(count / len(self.images))
        layout = self.training.state.precision.memory_format
        images = self.images.repeat(repeats, 1, 1, 1)[:count].contiguous(memory_format=layout)
        labels = self.labels.repeat(repeats)[:count]
        seconds: list[float] = []
        fewest, most = STEPS
        while len(seconds) < 2 + most:
            began = perf_counter()
            self.step(images, labels)
            if self.device.type != "cpu":
                torch.accelerator.synchronize(self.device)
            seconds.append(perf_counter() - began)
            if len(seconds) >= 2 + fewest and sum(seconds[2:]) >= ROUND_SECONDS:
                break
        return seconds[2:]

    def step(self, images: Tensor, labels: Tensor) -> None:
        """One step of training, which changes no weight: the learning rate is 0."""
        state = self.training.state
        for group in state.optimizer.param_groups:
            group["lr"] = 0.0
        model, loss_fn = self.training.ddp_model, self.training.loss_fn
        train_step(model, images, labels, loss_fn, state.precision, len(images))
        state.precision.step(state.optimizer)
        state.advance()


@dataclass(frozen=True)
class Found:
    """The result: all sizes that fit, in order, and why there is no larger one."""

    sizes: list[Size]
    total_bytes: int
    limit: str  # memory, or what else ended the search
    configured: int  # images at once, as `--data.batch-size` and `--optim.accumulate` say
    fp32_bytes: int | None = None  # peak of fp32 at that size; None: the format is fp32

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
    def bytes_per_image(self) -> float:
        """How memory grows with the size."""
        first, last = self.sizes[0], self.largest
        return (last.peak_bytes - first.peak_bytes) / max(1, last.images - first.images)


def find_batch(config: Config, training: ByCommand, at_most: int, processes: int) -> Found:
    """Try sizes of micro-batches, and write `batch.json` and `batch.html` to the run folder.

    Prints the table, what follows from it, and the command line to try, which `training` makes of
    changed knobs. A run has `processes`; one is measured.

    Raises:
        UserError: if the config, the data or the folder is unusable, or torchrun started this.
        FaultError: if not even one image fits.
    """
    folder = Path(config.run.dir)
    with join_world(config.compute, config.run.timeout_seconds) as world, open_run(config, world):
        if world.size > 1:
            raise UserError("find-batch measures one process: start it without torchrun")
        one = replace(config.data, workers=0, prefetch_batches=1)
        one = replace(one, batch_size=config.data.batch_size // processes)
        # Whole images of full size, of which none is loaded by a worker.
        config = replace(config, data=one, augment=replace(config.augment, min_size=0))
        with closing(TrainData(config, world)) as data:
            config, why = settle_precision(config, data, world)
            print(
                f"{config.model.name} at {one.image_size} pixels, {config.precision} ({why}), "
                f"{device_name(world.device)}, one process",
                flush=True,
            )
            found = search(config, world, data, at_most or len(data))
        text = conclude(found, config, training, processes)
        about = asdict(found) | {"precision": config.precision, "device": device_name(world.device)}
        write_json(folder / "batch.json", about | {"largest": found.largest.images, "text": text})
        write_text(folder / "batch.html", page(found, text))
        print("\n".join([f"written: {folder}/batch.html and batch.json", *text]))
    return found


def search(config: Config, world: World, data: TrainData, at_most: int) -> Found:
    """Measure growing sizes until memory ends; then the configured size in fp32, too."""
    sizes: dict[int, Size] = {}
    trial = Trial(config, world, data)
    total = trial.total_bytes

    def fits(images: int) -> bool:
        if images in sizes:
            return True
        if world.device.type != "cuda" and expected_bytes([*sizes.values()], images) > total:
            return False
        size = trial.measure(images)
        if size:
            sizes[images] = size
            rate, memory = f"{size.images_per_second:,.0f}", gigabytes(size.peak_bytes)
            print(f"{images:8,} images {rate:>10} images/s {memory:>12}", flush=True)
        return size is not None

    def is_slow(images: int) -> bool:
        return images / sizes[images].images_per_second > SLOW_SECONDS

    good, bad, limit = 0, min(2, at_most), ""
    while not limit:
        if not fits(bad):
            limit = "memory"
        elif (good := bad) == at_most:
            limit = f"more than {at_most:,} were not tried"
        elif is_slow(good):
            limit = f"a larger one takes more than {SLOW_SECONDS:g} s per step"
        else:
            bad = min(2 * good, at_most)
    while limit == "memory" and (step := (bad - good) // 2) and step >= good // FINENESS:
        good, bad = (good + step, bad) if fits(good + step) else (good, good + step)
    if not sizes:
        raise FaultError(
            "not even one image at a time fits; a smaller --data.image-size or --model.name, "
            "--compute.gradient-checkpointing, or --data.where host, needs less"
        )
    configured = config.data.batch_size // config.optim.accumulate
    found = Found([*sizes.values()], total, limit, configured)
    # The knee of the curve, and what the user has, are seldom powers of two.
    for images in (found.enough.images * 3 // 4, configured):
        if 0 < images <= good:
            fits(images)
    found = replace(found, sizes=sorted(sizes.values(), key=lambda size: size.images))
    if config.precision == "fp32" or configured not in sizes:
        return found
    del trial  # which makes room
    in_fp32 = Trial(replace(config, precision="fp32"), world, data)
    expected = 2 * sizes[configured].peak_bytes  # at most: all activations take twice as much
    is_safe = world.device.type == "cuda" or expected <= total
    size = in_fp32.measure(configured) if is_safe else None
    return replace(found, fp32_bytes=size.peak_bytes if size else expected)


def expected_bytes(sizes: list[Size], images: int) -> float:
    """The peak of a larger size, by the growth between the last two."""
    if len(sizes) < 2:
        return 0
    first, last = sizes[-2:]
    growth = (last.peak_bytes - first.peak_bytes) / (last.images - first.images)
    return last.peak_bytes + max(0, growth) * (images - last.images)


def conclude(found: Found, config: Config, training: ByCommand, processes: int) -> list[str]:
    """What follows, in sentences; the last is a command line to try."""
    largest, enough, configured = found.largest, found.enough, found.configured
    total, share = gigabytes(found.total_bytes), config.data.batch_size
    of_all = f" on each of {processes} processes" if processes > 1 else ""
    says = f"--data.batch-size {share * processes}{of_all}"
    if config.optim.accumulate > 1:
        says += f" with --optim.accumulate {config.optim.accumulate}"
    memory = gigabytes(largest.peak_bytes)
    text = [
        f"largest micro-batch that fits: {largest.images:,} images ({memory} of {total}); "
        f"limit: {found.limit}",
        f"smallest within 5% of the best images/s: {enough.images:,} images; "
        "larger ones buy no speed here",
    ]
    here = next((size for size in found.sizes if size.images == configured), None)
    if here is None:
        parts = next(
            n for n in range(1, share + 1) if share % n == 0 and share // n <= largest.images
        )
        return [
            *text,
            f"{says}, {configured:,} images at once, does not fit",
            f"try: {training(optim__accumulate=parts)} (the same batch in micro-batches of "
            f"{share // parts}, from which BatchNorm takes its statistics)",
        ]
    takes = f"{says}, {configured:,} images at once, takes {gigabytes(here.peak_bytes)} of {total}"
    twice = here.peak_bytes + configured * found.bytes_per_image
    has_room = largest.images >= 2 * configured or (
        found.limit != "memory" and twice < found.total_bytes
    )
    text.append(
        f"{takes}: "
        + ("you could take twice the batch" if has_room else "twice the batch does not fit")
    )
    if found.fp32_bytes:
        # All that grows with the size is above what the smallest size takes.
        grown = found.fp32_bytes - found.sizes[0].peak_bytes
        fits = found.fp32_bytes + grown < found.total_bytes
        made = (
            ""
            if fits or not has_room
            else f": {config.precision} makes the room for twice the batch"
        )
        text.append(f"in fp32 it would take {gigabytes(found.fp32_bytes)}{made}")
    if config.optim.accumulate > 1 and largest.images >= share:
        text.append(f"try: {training(optim__accumulate=1)} (the whole batch fits at once)")
    elif enough.images >= 2 * configured:
        ratio = enough.images // configured
        is_sgd = config.optim.name == "sgd"
        lr = float(f"{config.optim.lr * (ratio if is_sgd else ratio**0.5):.2g}")
        knobs = {"data__batch_size": ratio * share * processes, "optim__lr": lr}
        rule = "linear" if is_sgd else "square-root"
        text.append(
            f"try: {training(**knobs)} ({rule} scaling of the learning rate is a start, not a rule: "
            "fewer steps learn differently; find-lr and compare tell)"
        )
    else:
        text.append(f"a larger batch buys no speed: {training()}")
    return text


def gigabytes(count: float) -> str:
    """Bytes for a reader: `11.2 GB`, `0.42 GB`."""
    return f"{count / 2**30:.3g} GB"


def page(found: Found, text: list[str]) -> str:
    """Images per second and memory over the size, and what follows, as an HTML page."""
    rates = [(size.images, size.images_per_second) for size in found.sizes]
    memory = [(size.images, size.peak_bytes / 2**30) for size in found.sizes]
    label = "images in a micro-batch"
    charts = line_chart("images per second", {"": rates}, low=0, x_label=label, is_log=True)
    charts += line_chart("memory", {"": memory}, unit=" GB", low=0, x_label=label, is_log=True)
    rows = "".join(
        f'<tr><td class="number">{size.images:,}</td>'
        f'<td class="number">{size.images_per_second:,.0f}</td>'
        f'<td class="number">{gigabytes(size.peak_bytes)}</td></tr>'
        for size in found.sizes
    )
    heads = "".join(f'<th class="number">{head}</th>' for head in ("images", "images/s", "memory"))
    notes = "".join(f"<p>{escape(line)}</p>" for line in text)
    body = f'<h1>Batch size</h1>{notes}<div class="curves">{charts}</div>'
    body += f"<table><thead><tr>{heads}</tr></thead>{rows}</table>"
    return PAGE.substitute(title="Batch size", body=body)
