"""Tips on how images reach the device."""

import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ....augment import build_augment
from ....config import PREPARED_QUALITY, PREPARED_SIDE
from ....data import (
    MEMORY_SHARE,
    OFF,
    Batch,
    Recipe,
    Samples,
    SharedMemoryLoader,
    fits_device,
    prepare_images,
    worker_counts,
)
from ....runtime.machine import host_memory_bytes, num_cores
from .case import Case, NotHereError, Variants, need_gpu, streamed, with_knobs
from .trial import Trial, Variant

SAMPLE = "sample"  # folder for a part of the images
SAMPLED_IMAGES = 512  # that are prepared to see what it buys, or two batches
RESIDENT_IMAGES = 2048  # that are decoded to see the same, where all of them are streamed


def num_workers(case: Case) -> Variants:
    """Decode images in worker processes, and in how many of them.

    - Why: decoding takes milliseconds for each photograph, and the loop that waits for it leaves
      the device idle. Workers decode the next batches meanwhile, and as many as keep up are enough.
    - When it hurts: more workers than cores only take turns, and each needs memory. Where the model
      runs on the CPU too, workers take its cores. The common rule of 4 workers for each GPU knows
      neither your cores nor your photographs; where there is a GPU, it is one of those measured.
    - Knob: `--data.workers`; `auto` measures when a dataset is first seen on a machine.
    - Source: <https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html>
    """
    config, cores = streamed(case), num_cores()
    settled = config.data.workers
    assert settled != "auto"
    counts = sorted({0, settled, *worker_counts(cores, case.world)})
    is_rule = {4 * case.num_gpus: " (4 x GPUs)"} if case.num_gpus else {}
    return {
        f"{count}{is_rule.get(count, '')}": Variant(with_knobs(config, {"data.workers": count}))
        for count in counts
    }


def prefetch(case: Case) -> Variants:
    """Decode batches ahead of the one in use, and how many.

    - Why: some photographs take longer than others; a few batches that lie ready even it out.
    - When it hurts: each batch ahead takes memory. Depth does not help workers that are too slow
      on average.
    - Knob: `--data.prefetch-batches`, over all workers of a process; DataLoader's `prefetch_factor`
      counts for each worker.
    - Source: <https://docs.pytorch.org/docs/stable/data.html>
    """
    config = streamed(case)
    depths = sorted({1, 4, 16, config.data.prefetch_batches})
    return {
        f"{depth} ahead": Variant(with_knobs(config, {"data.prefetch_batches": depth}))
        for depth in depths
    }


def persistent_workers(case: Case) -> Variants:
    """Keep workers, instead of starting them anew for each epoch.

    - Why: starting them takes time, and so does the first batch, for which everything waits.
    - When it hurts: never in speed. What a worker has in memory stays there.
    - Knob: none, DataLoader's `persistent_workers=True` is always set; without it they start anew
      in each epoch.
    - Source: <https://docs.pytorch.org/docs/stable/data.html>
    """
    config = streamed(case)
    return {"new in each epoch": Variant(config, restart_workers), "kept": Variant(config)}


def restart_workers(trial: Trial) -> None:
    """Begin each epoch with new ones."""
    # A fork makes the next step slower too: what it writes to was shared, and is copied first.
    trial.restart, trial.settling_steps = trial.data.close, 1


def pin_memory(case: Case) -> Variants:
    """Copy to the GPU from page-locked memory.

    - Why: the GPU fetches from it by itself. From other memory the driver first copies to a
      page-locked buffer of its own, and the CPU waits for it.
    - When it hurts: it can't be swapped out, so a machine that is short of memory suffers; and to
      pin takes time, which is lost where it is done for every batch. It is pinned once here.
    - Knob: none, it is always done for a GPU; DataLoader's `pin_memory=True` does it per batch.
    - Source: <https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html>
    """
    need_gpu(case)
    config = streamed(case)
    return {"pageable": Variant(config, unpin), "pinned": Variant(config)}


def unpin(trial: Trial) -> None:
    """Leave the slots in memory that can be moved."""
    trial.data.loader.pin = False


def non_blocking(case: Case) -> Variants:
    """Copy the next batch in a stream of its own while the model computes.

    - Why: a GPU copies and computes at the same time, but only in different streams, from pinned
      memory, and if the CPU does not wait for the copy.
    - When it hurts: memory that is overwritten before the copy is through gives wrong images
      without an error. Here a slot is used again only after an event that follows its copy.
    - Knob: none, it is always done; by hand `tensor.to(device, non_blocking=True)` in a
      `torch.cuda.Stream`.
    - Source: <https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html>
    """
    need_gpu(case)
    config = streamed(case)
    return {"copied in the step": Variant(config, block), "side stream": Variant(config)}


def block(trial: Trial) -> None:
    """Copy a batch when it is its turn, and wait."""

    def batches(start: int, stop: int) -> Iterator[Batch]:
        for host in trial.data.loader.batches(trial.data.places(start, stop)):
            yield Batch(*(tensor.to(trial.world.device) for tensor in host))

    trial.batches = batches


def uint8(case: Case) -> Variants:
    """Hand batches over as bytes, and normalise on the device.

    - Why: float32 is four times as much to write, to copy between processes and to send to the GPU;
      and the device normalises a whole batch faster than a worker does it image by image.
    - When it hurts: never in speed. Augmentations that need float numbers must come after it.
    - Knob: none, it is always done.
    - Source: <https://docs.nvidia.com/deeplearning/dali/user-guide/docs/>, which does the same
    """
    config = streamed(case)
    return {"float32 from workers": Variant(config, normalize_in_workers), "uint8": Variant(config)}


class FloatSamples:
    """Normalised images."""

    def __init__(self, samples: Samples) -> None:
        """Those of `samples`, which are bytes."""
        self.samples, self.source, self.size = samples, samples.source, samples.size
        deviation = 255 * torch.tensor(samples.source.std)
        # Rows rather than single pixels, as on the device.
        self.scale = (1 / deviation).repeat(samples.size)
        self.shift = (255 * torch.tensor(samples.source.mean) / deviation).repeat(samples.size)

    def fill(self, out: Tensor, epoch: int, indices: np.ndarray) -> dict[int, str]:
        """As `Samples.fill`, to float32."""
        pixels = torch.empty(out.shape, dtype=torch.uint8)
        unreadable = self.samples.fill(pixels, epoch, indices)
        out.copy_(pixels)
        out.flatten(2).mul_(self.scale).sub_(self.shift)
        return unreadable


def normalize_in_workers(trial: Trial) -> None:
    """Send float32 images through shared memory, which takes four times as much of it."""
    data, loader = trial.data, trial.data.loader
    data.loader = SharedMemoryLoader(
        FloatSamples(loader.samples),
        loader.images.shape[1],
        data.workers,
        trial.config.data.prefetch_batches,
        loader.pin,
        dtype=torch.float32,
    )
    layout = trial.normalize.memory_format
    trial.augment = build_augment(
        trial.config.augment,
        data,
        lambda images: images.contiguous(memory_format=layout),
        trial.world,
        trial.config.seed,
    )


def shared_memory(case: Case) -> Variants:
    """Let the workers of torch's DataLoader write into shared memory that is used again and again.

    - Why: by default a worker makes a tensor for each image, copies all of them into a batch in new
      shared memory, and sends a handle of it; its pages are faulted in anew each time, and for a
      GPU the batch is copied once more to pinned memory. Here a worker decodes into its rows of a
      batch and returns a few numbers, and several workers share in a batch.
    - When it hurts: a batch must be used before the one after the next is asked for. Samples of
      different sizes need DataLoader's `collate_fn`.
    - Knob: none, it is always done.
    - Source: <https://docs.pytorch.org/docs/stable/data.html>
    """
    config = streamed(case)
    usual = Variant(config, use_collating_loader)
    return {"collated by DataLoader": usual, "shared memory": Variant(config)}


class PlainDataset(Dataset):
    """The same images, one by one."""

    def __init__(self, samples: Samples) -> None:
        """The images, by epoch and index."""
        self.samples = samples

    def __getitem__(self, place: tuple[int, int]) -> tuple[Tensor, Tensor, int]:
        """Image, label and index."""
        epoch, index = place
        pixels = torch.empty((1, self.samples.size, self.samples.size, 3), dtype=torch.uint8)
        self.samples.fill(pixels, epoch, np.array([index]))
        return pixels[0], self.samples.source.labels[index], index


def use_collating_loader(trial: Trial) -> None:
    """Use a DataLoader as tutorials do: it collates, pins and prefetches; workers stay."""
    device, workers = trial.world.device, trial.data.workers
    batch_sampler: list[list[tuple[int, int]]] = []
    loader = DataLoader(
        PlainDataset(trial.data.loader.samples),
        batch_sampler=batch_sampler,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=device.type == "cuda",
    )

    def batches(start: int, stop: int) -> Iterator[Batch]:
        batch_sampler[:] = [
            [(epoch, index) for index in indices.tolist()]
            for epoch, indices in trial.data.places(start, stop)
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about forks and numbers of workers
            ready = iter(loader)
        for host in ready:
            yield Batch(*(tensor.to(device, non_blocking=True) for tensor in host))

    trial.batches = batches


def resident(case: Case) -> Variants:
    """Keep all images in memory, on the device if they fit.

    - Why: a batch is then a gather of bytes in memory, and needs no decoding, workers or copy.
    - When it hurts: it takes the memory that they need, which is missing for larger batches. Crops
      are cut from images that were scaled to one size, where streaming cuts them from the whole
      photograph.
    - Knob: `--data.where`; `auto` keeps images in memory where they fit and no pixel changes.
    - Source: <https://myrtle.ai/learn/how-to-train-your-resnet/>
    """
    config, source = case.config, case.data.source
    if config.augment.policy != "none":
        raise NotHereError(f"{config.augment.policy} needs images to be streamed")
    count = len(source)
    if config.data.where == "stream" and source.pixels is None and count > RESIDENT_IMAGES:
        count = max(RESIDENT_IMAGES, config.data.batch_size)
        config = with_knobs(config, {"data.limit": count})
    needed_bytes = count * config.data.image_size**2 * 3
    wheres = {
        "stream": True,
        "host": needed_bytes < MEMORY_SHARE * host_memory_bytes(),
        "device": fits_device(needed_bytes, case.world),
    }
    # What is in memory already fits.
    wheres[case.config.data.where] = True
    if list(wheres.values()) == [True, False, False]:
        raise NotHereError(f"{needed_bytes / 2**30:,.0f} GB of images, too much for memory")
    same_pixels = config.augment.crop != "resized"
    workers = streamed(case).data.workers
    return {
        where: Variant(
            with_knobs(config, {"data.where": where} | streams_with(where, workers)),
            is_choice=same_pixels,
        )
        for where, fits in wheres.items()
        if fits
    }


def streams_with(where: str, workers: object) -> dict[str, object]:
    """Knobs that go with a place: workers, where images are streamed."""
    return {"data.workers": workers} if where == "stream" else {}


def prepared(case: Case) -> Variants:
    """Write photographs once at the size that training needs, and read those.

    - Why: a photograph of several megapixels takes most of its time to be decoded to what is thrown
      away. Raw pixels need no decoding at all, and are read through the system's cache of the disk;
      JPEGs of that size take an eighth of the space.
    - When it hurts: raw pixels take 150 to 270 KB for each image; where they don't fit into memory
      the disk must keep up. Random crops are cut from the smaller image: other pixels.
    - Knob: `prepare`, with `--format raw` or `jpeg`; training uses what is there, unless
      `--data.cache off`.
    - Source: <https://arxiv.org/abs/2306.12517>
    """
    source, data = case.data.source, case.config.data
    if source.paths is None:
        raise NotHereError("needs photographs in files; these images are in memory")
    if source.recipe:
        config = streamed(case)
        return {
            "files": Variant(with_knobs(config, {"data.cache": OFF}), is_choice=False),
            f"prepared, {source.recipe}": Variant(config, is_choice=False),
        }
    root = case.folder / SAMPLE
    count = min(len(source), max(SAMPLED_IMAGES, 2 * data.batch_size))
    print(f"preparing {count:,} of the images, to see what it buys", flush=True)
    link_sample(case, root / "images", count)
    knobs = {"data.name": "folder", "data.root": str(root / "images"), "data.limit": 0}
    config = with_knobs(streamed(case), knobs)
    variants = {"files": Variant(with_knobs(config, {"data.cache": OFF}), is_choice=False)}
    for form in ("jpeg", "raw"):
        cached = with_knobs(config, {"data.cache": str(root / form)})
        prepare_images(
            cached.data,
            ("train",),
            Recipe(form, max(PREPARED_SIDE, data.image_size), PREPARED_QUALITY),
        )
        variants[f"prepared, {form}"] = Variant(cached, is_choice=False)
    return variants


def link_sample(case: Case, root: Path, count: int) -> None:
    """Make `root` a folder of some of the training images, by links to them."""
    shutil.rmtree(root, ignore_errors=True)
    (root / "val").mkdir(parents=True)  # or else some of them would fall to validation
    sample = case.data.source.thinned(count)
    assert sample.paths is not None
    for number, label in enumerate(sample.labels.tolist()):
        path = Path(sample.paths[number]).resolve()
        link = root / "train" / f"{label:06}" / f"{number:06}{path.suffix}"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path)
