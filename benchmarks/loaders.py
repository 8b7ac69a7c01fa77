# ruff: noqa: PLC0415 - a contender's process imports what that contender needs, and nothing else
"""Loaders alone: JPEG files to training batches, two workers, batches of 64, 224 x 224 pixels.

    python benchmarks/loaders.py                      # generated photographs, 500 x 375
    python benchmarks/loaders.py --root FOLDER        # yours: FOLDER/train/<class>/*.jpg
    python benchmarks/loaders.py --rounds 1 --images 512 --only pil-v1 ours     # a quick look
    python benchmarks/loaders.py --pixels             # no timing: how far our pixels are from PIL's

Everybody makes the same of a file: a random resized crop of the same range of areas, a flip for
every other one, ImageNet's normalization. Workers' start, the first batches and the end of the
stream lie outside of what is timed. CPU time is that of the process and all its workers. One table
is of batches that are ready to train on (float32, normalized), the other of uint8 batches, as they
are best handed to a GPU that normalizes by itself: there each loader is told to leave that out.

Prints and writes `results/loaders.json` (`loaders-<folder>.json` with `--root`).
"""

import argparse
import itertools
import random
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measurements
import pictures
import project
import rounds

# The way from a file to a batch.
ABOUT = "augment data tools/prepare"

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SKIPPED = 16  # batches before the clock starts: by then everybody's queues are as full as they get
LEFT = 16  # batches after it stops, so that workers are as busy at the end as in the middle
COMPARED = 256  # crops whose pixels are compared


@dataclass(frozen=True)
class Task:
    """What is asked of every loader."""

    root: Path  # with `train/<class>/`
    scratch: Path  # where a loader may keep what it makes of the files beforehand
    size: int = 224
    batch: int = 64
    min_area: float = 0.08
    workers: int = 2
    ready: bool = True  # normalized float32, else uint8
    device: str = "cpu"  # where a loader puts its batches, if it does


Batches = Iterator[tuple[Any, Any]]  # images and labels, both tensors


def endless(loader: Any) -> Batches:  # noqa: ANN401 - anything that can be iterated anew
    """Epoch after epoch of a loader."""
    return itertools.chain.from_iterable(itertools.repeat(loader))


def pil_v1_loader(task: Task) -> Any:  # noqa: ANN401 - a DataLoader
    """The pipeline of pytorch/examples, restated.

    https://github.com/pytorch/examples/blob/main/imagenet/main.py
    """
    from torch.utils.data import DataLoader
    from torchvision import datasets, transforms

    last = [transforms.PILToTensor()]
    if task.ready:
        last = [transforms.ToTensor(), transforms.Normalize(mean=MEAN, std=STD)]
    crop = transforms.RandomResizedCrop(task.size, scale=(task.min_area, 1))
    transform = transforms.Compose([crop, transforms.RandomHorizontalFlip(), *last])
    dataset = datasets.ImageFolder(str(task.root / "train"), transform)
    return DataLoader(dataset, task.batch, shuffle=True, num_workers=task.workers, pin_memory=True)


def pil_v1(task: Task) -> Batches:
    """The same, epoch after epoch."""
    return endless(pil_v1_loader(task))


def v2_transform(task: Task) -> Callable:
    """The transforms that torchvision recommends: v2, on uint8 tensors, antialiased.

    https://docs.pytorch.org/vision/stable/transforms.html#performance-considerations and
    https://github.com/pytorch/vision/blob/main/references/classification/presets.py
    """
    import torch
    from torchvision.transforms import v2

    crop = v2.RandomResizedCrop(task.size, scale=(task.min_area, 1), antialias=True)
    steps = [crop, v2.RandomHorizontalFlip()]
    if task.ready:
        steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean=MEAN, std=STD)]
    return v2.Compose(steps)


def decode_v2(path: str) -> Any:  # noqa: ANN401 - a tensor, but torch is not imported up here
    """A file to (3, height, width) uint8, by torchvision."""
    from torchvision.io import ImageReadMode, decode_image

    return decode_image(path, mode=ImageReadMode.RGB)


def torchvision_v2(task: Task) -> Batches:
    """A DataLoader with the decoder and the v2 transforms of torchvision."""
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder

    dataset = ImageFolder(str(task.root / "train"), v2_transform(task), loader=decode_v2)
    loader = DataLoader(
        dataset, task.batch, shuffle=True, num_workers=task.workers, pin_memory=True
    )
    return endless(loader)


def timm_loader(task: Task, prefetcher: bool = True) -> Batches:
    """The loader that timm's train.py makes; without color jitter, which nobody else has here.

    https://github.com/huggingface/pytorch-image-models/blob/main/train.py
    """
    import torch
    from timm.data import create_dataset, create_loader

    loader = create_loader(
        create_dataset("", root=str(task.root), split="train", is_training=True),
        input_size=(3, task.size, task.size),
        batch_size=task.batch,
        is_training=True,
        scale=(task.min_area, 1),
        color_jitter=None,
        interpolation="bilinear",
        mean=MEAN,
        std=STD,
        num_workers=task.workers,
        device=torch.device(task.device),
        use_prefetcher=prefetcher,
    )
    # Its prefetcher takes uint8 batches from the workers, and normalizes them in this process.
    return endless(loader if task.ready else loader.loader)


def timm_no_prefetcher(task: Task) -> Batches:
    """The same with `--no-prefetcher`: normalized in the workers."""
    return timm_loader(task, prefetcher=False)


def webdataset(task: Task) -> Batches:
    """Tar shards, decoded by PIL, batched in the workers, as its documentation has it.

    https://webdataset.github.io/webdataset/gettingstarted/
    """
    import webdataset as wds
    from torchvision import transforms

    last = [transforms.PILToTensor()]
    if task.ready:
        last = [transforms.ToTensor(), transforms.Normalize(mean=MEAN, std=STD)]
    crop = transforms.RandomResizedCrop(task.size, scale=(task.min_area, 1))
    transform = transforms.Compose([crop, transforms.RandomHorizontalFlip(), *last])
    dataset = (
        wds.WebDataset(shards(task), resampled=True, shardshuffle=False)
        .shuffle(1000)
        .decode("pil")
        .to_tuple("jpg", "cls")
        .map_tuple(transform, int)
        .batched(task.batch, partial=False)
    )
    return iter(wds.WebLoader(dataset, batch_size=None, shuffle=False, num_workers=task.workers))


def shards(task: Task) -> list[str]:
    """The training images in tar files, written the first time."""
    import webdataset as wds

    folder = task.scratch / "shards"
    if not folder.exists():
        folder.mkdir()
        classes = sorted(path.name for path in (task.root / "train").iterdir())
        paths = sorted((task.root / "train").glob("*/*"), key=lambda path: path.name)
        with wds.ShardWriter(str(folder / "%06d.tar"), maxcount=500, verbose=0) as writer:
            for number, path in enumerate(paths):
                label = classes.index(path.parent.name)
                sample = {"__key__": f"{number:08}", "jpg": path.read_bytes(), "cls": label}
                writer.write(sample)
    return sorted(map(str, folder.glob("*.tar")))


def labeled_paths(task: Task) -> Iterator[tuple[str, int]]:
    """Files and labels in random order, without an end."""
    classes = sorted(path.name for path in (task.root / "train").iterdir())
    pairs = [
        (str(path), label)
        for label, name in enumerate(classes)
        for path in (task.root / "train" / name).iterdir()
    ]
    chance = random.Random(0)
    while True:
        chance.shuffle(pairs)
        yield from pairs


def spdl(task: Task) -> Batches:
    """Its pipeline of threads with its own decoder and FFmpeg's crop, scale and flip.

    https://facebookresearch.github.io/spdl/latest/getting_started/pytorch.html and
    https://github.com/facebookresearch/spdl/blob/main/examples/multi_thread_preprocessing.py
    It needs the shared libraries of FFmpeg.
    """
    import spdl.io
    import torch
    from torchvision.transforms import Normalize, RandomResizedCrop

    normalize = Normalize(mean=MEAN, std=STD)

    def decode(item: tuple[str, int]) -> tuple[Any, int]:
        packets = spdl.io.demux_image(item[0])
        shape = torch.empty(1).expand(3, packets.height, packets.width)  # is all it asks for
        top, left, height, width = RandomResizedCrop.get_params(
            shape, scale=(task.min_area, 1), ratio=(3 / 4, 4 / 3)
        )
        flip = "hflip," if random.random() < 0.5 else ""
        chain = (
            f"crop={width}:{height}:{left}:{top}:exact=1,"
            f"scale={task.size}:{task.size}:flags=bilinear,{flip}format=pix_fmts=rgb24"
        )
        return spdl.io.decode_packets(packets, filter_desc=chain), item[1]

    def convert(items: list[tuple[Any, int]]) -> tuple[Any, Any]:
        frames, labels = zip(*items, strict=True)
        images = spdl.io.to_torch(spdl.io.convert_frames(list(frames))).permute(0, 3, 1, 2)
        images = normalize(images.float() / 255) if task.ready else images
        return images, torch.tensor(labels)

    return run_pipeline(task, decode, convert)


def spdl_v2(task: Task) -> Batches:
    """Its pipeline of threads around torchvision's decoder and v2 transforms: no FFmpeg needed."""
    import torch

    transform = v2_transform(task)

    def decode(item: tuple[str, int]) -> tuple[Any, int]:
        return transform(decode_v2(item[0])), item[1]

    def collate(items: list[tuple[Any, int]]) -> tuple[Any, Any]:
        images, labels = zip(*items, strict=True)
        return torch.stack(images), torch.tensor(labels)

    torch.set_num_threads(1)  # each of its threads has one image; torch's own would be in the way
    return run_pipeline(task, decode, collate)


def run_pipeline(task: Task, decode: Callable, collate: Callable) -> Batches:
    """What comes out of a pipeline of spdl, which is stopped at the end."""
    from spdl.pipeline import PipelineBuilder

    pipeline = (
        PipelineBuilder()
        .add_source(labeled_paths(task))
        .pipe(decode, concurrency=task.workers)
        .aggregate(task.batch)
        .pipe(collate)
        .add_sink(task.workers)
        .build(num_threads=task.workers, max_failures=0)
    )
    with pipeline.auto_stop():
        yield from pipeline


def dali(task: Task) -> Batches:
    """DALI on the CPU: decoding of the crop's region alone.

    https://docs.nvidia.com/deeplearning/dali/user-guide/docs/examples/use_cases/pytorch/resnet50/pytorch-resnet50.html
    """
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.pytorch import DALIClassificationIterator

    output: dict[str, Any] = {"dtype": types.UINT8, "output_layout": "CHW"}
    if task.ready:
        output["dtype"] = types.FLOAT
        output["mean"], output["std"] = ([255 * x for x in numbers] for numbers in (MEAN, STD))

    @pipeline_def(batch_size=task.batch, num_threads=task.workers, device_id=None, seed=0)
    def pipeline() -> tuple[Any, Any]:
        files, labels = fn.readers.file(
            file_root=str(task.root / "train"), random_shuffle=True, name="Reader"
        )
        images = fn.decoders.image_random_crop(
            files,
            device="cpu",
            output_type=types.RGB,
            random_aspect_ratio=[3 / 4, 4 / 3],
            random_area=[task.min_area, 1],
            num_attempts=100,
        )
        images = fn.resize(images, size=[task.size, task.size], interp_type=types.INTERP_TRIANGULAR)
        mirror = fn.random.coin_flip(probability=0.5)
        return fn.crop_mirror_normalize(images, mirror=mirror, **output), labels

    iterator = DALIClassificationIterator(pipeline(), reader_name="Reader", auto_reset=True)
    for [batch] in endless(iterator):
        yield batch["data"], batch["label"]


def build_config(task: Task, cache: str = "none") -> Any:  # noqa: ANN401 - a config
    """Crops and flips of the files at `task.root`, or of what `prepare` wrote to `cache`."""
    return project.build_config(
        data={
            "root": str(task.root),
            "cache": str(task.scratch / cache),
            "image_size": task.size,
            "batch_size": task.batch,
            "where": "stream",
            "workers": task.workers,
        },
        augment={"crop": "resized", "min_scale": task.min_area, "flip": "random"},
    )


def ours(task: Task, cache: str = "none") -> Batches:
    """The batches that `train` of a generated project sees, before or after its `augment`."""
    return project.input_batches(build_config(task, cache), task.ready)


def ours_prepared(task: Task, form: str) -> Batches:
    """Ours from a cache of one of two formats."""
    prepare(task.root, task.scratch / form, form)
    return ours(task, form)


def prepare(root: Path, cache: Path, form: str) -> None:
    """Let the verb `prepare` of a generated project write a cache; one that is complete stays."""
    main = "import sys; from image_classifier.cli import main; sys.exit(main())"
    words = f"prepare folder --data.root {root} --data.cache {cache} --format {form}"
    subprocess.run(
        [sys.executable, "-c", main, *words.split()], check=True, stdout=subprocess.DEVNULL
    )
    pictures.warm(cache)


def ours_prepared_jpeg(task: Task) -> Batches:
    """Ours, from the smaller cache: JPEGs whose shorter side is 256."""
    return ours_prepared(task, "jpeg")


def ours_prepared_raw(task: Task) -> Batches:
    """Ours, from the faster cache: pixels, shorter side 256."""
    return ours_prepared(task, "raw")


def bare(task: Task, cache: str = "none") -> Batches:
    """Our decode and crop on one core, in a plain loop: what a loader without costs would do."""
    import torch
    from image_classifier.data.loader import TrainData
    from image_classifier.runtime.distributed import join_world

    config = build_config(task, cache)
    with join_world(config.compute) as world:
        torch.set_num_threads(1)
        data = TrainData(config, world)
        images = torch.empty((task.batch, task.size, task.size, 3), dtype=torch.uint8)
        for step in itertools.count():
            indices = data.indices_at(step)
            data.loader.samples.fill(images, step // data.steps_per_epoch, indices.numpy())
            yield images.permute(0, 3, 1, 2), data.source.labels[indices]


def bare_prepared_raw(task: Task) -> Batches:
    """The same from the faster cache."""
    prepare(task.root, task.scratch / "raw", "raw")
    return bare(task, "raw")


CONTENDERS: dict[str, Callable[[Task], Batches]] = {
    "pil-v1": pil_v1,
    "torchvision-v2": torchvision_v2,
    "timm": timm_loader,
    "timm-no-prefetcher": timm_no_prefetcher,
    "webdataset": webdataset,
    "spdl": spdl,
    "spdl-v2": spdl_v2,
    "dali": dali,
    "ours": ours,
    "ours-prepared-jpeg": ours_prepared_jpeg,
    "ours-prepared-raw": ours_prepared_raw,
}
PEERS = ("timm", "timm-no-prefetcher", "webdataset", "spdl", "spdl-v2", "dali")
UINT8 = {f"{name}:uint8": loader for name, loader in CONTENDERS.items()}
del UINT8["timm-no-prefetcher:uint8"]  # it has no such batches
UINT8["bare:uint8"] = bare
UINT8["bare-prepared-raw:uint8"] = bare_prepared_raw


def measure(batches: Batches, steps: int, task: Task) -> dict[str, float]:
    """CPU milliseconds per image, and images per second, over `steps` batches in mid-stream."""
    for _ in range(SKIPPED):
        images, _ = next(batches)
    began = rounds.Reading.now()
    for _ in range(steps):
        images, _ = next(batches)
    took = rounds.Reading.now().since(began)
    dtype = "torch.float32" if task.ready else "torch.uint8"
    assert tuple(images.shape) == (task.batch, 3, task.size, task.size), images.shape
    assert str(images.dtype) == dtype, images.dtype
    count = steps * task.batch
    return {"cpu_ms": 1e3 * took.cpu_seconds / count, "images_per_second": count / took.seconds}


def pixel_differences(task: Task) -> dict[str, float]:
    """How far our pixels are from those of PIL and torchvision's v1 transforms, box for box."""
    import numpy as np
    import torch
    from image_classifier.data.crops import BOX_DRAWS, place_box, random_sides
    from image_classifier.data.loader import TrainData
    from image_classifier.runtime import seeding
    from image_classifier.runtime.distributed import join_world
    from PIL import Image
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.functional import hflip, resized_crop

    config = build_config(task)
    indices = np.arange(COMPARED)
    images = torch.empty((COMPARED, task.size, task.size, 3), dtype=torch.uint8)
    with join_world(config.compute) as world:
        data = TrainData(config, world)
    samples = data.loader.samples
    samples.fill(images, 0, indices)
    draws = torch.from_numpy(
        seeding.draws_at(seeding.SAMPLE, config.seed, 0, indices=indices, count=BOX_DRAWS + 1)
    )
    sides = random_sides(draws[:, 2:-1], task.min_area).tolist()
    differences = []
    for index, ours in enumerate(images.numpy()):
        with Image.open(data.source.paths[index]) as file:
            image = file.convert("RGB")
        box = place_box(sides[index], draws[index, :2].tolist(), image.height, image.width)
        theirs = resized_crop(image, *box, [task.size, task.size], InterpolationMode.BILINEAR)
        theirs = hflip(theirs) if samples.is_mirrored(index, 0, float(draws[index, -1])) else theirs
        difference = np.abs(ours.astype(int) - np.asarray(theirs).astype(int))
        differences.append((float(difference.mean()), int(difference.max())))
    means, largest = zip(*differences, strict=True)
    return {
        "mean_difference_of_255": sum(means) / len(means),
        "mean_of_the_image_that_differs_most": max(means),
        "the_pixel_that_differs_most": max(largest),
    }


def goals(results: measurements.Results) -> list[dict[str, Any]]:
    """What was asked for, and what came out."""

    def goal(what: str, asked: str, name: str, baseline: str) -> dict[str, Any]:
        found = measurements.numbers(results, name, f"cpu_ms x {baseline}")
        return measurements.goal(f"CPU time of {name}{what} to that of {baseline}", asked, found)

    lines = []
    asked = {"ours": "<= 0.5", "ours-prepared-jpeg": "<= 0.2", "ours-prepared-raw": "<= 0.06"}
    for name, limit in asked.items():
        lines.append(goal(", as it hands batches over,", limit, f"{name}:uint8", "pil-v1"))
        lines.append(goal("", limit, name, "pil-v1"))
    for kind in ("", ":uint8"):
        for peer in best_peer(results, kind):
            lines.append(goal(", the best peer being that,", "<= 1", f"ours{kind}", peer))
    for form in ("", "-prepared-raw"):
        lines.append(goal(", one core alone,", ">= 0.92", f"bare{form}:uint8", f"ours{form}:uint8"))
    return lines


def best_peer(results: measurements.Results, kind: str) -> list[str]:
    """The peer that takes the least CPU time for this kind of batches, if one was measured."""
    peers = [name + kind for name in PEERS if name + kind in results]
    return sorted(peers, key=lambda name: min(measurements.numbers(results, name, "cpu_ms")))[:1]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Let a comparison choose its photographs; `training.py` does too."""
    parser.add_argument("--root", type=Path, help="folder with train/<class>/; default: generated")
    parser.add_argument("--distinct", type=int, default=512, help="generated files (512)")
    parser.add_argument("--min-area", type=float, default=0.08, help="of random crops (0.08)")
    parser.add_argument("--scratch", type=Path, help="keep here what is made, for the next time")


def main() -> None:
    """Compare."""
    parser = rounds.parser(__doc__, rounds=5)
    add_options(parser)
    parser.add_argument("--images", type=int, default=3072, help="timed per round (3072)")
    parser.add_argument("--pixels", action="store_true", help="compare pixels, measure no time")
    options = parser.parse_args()
    if options.contender:
        contend(options)
        return
    with tempfile.TemporaryDirectory() as temporary:
        scratch = (options.scratch or Path(temporary)).resolve()
        count = options.images + (SKIPPED + LEFT) * Task.batch
        what = make_long(options, scratch, count)
        name = f"loaders-{options.root.resolve().name}" if options.root else "loaders"
        if options.pixels:
            options.rounds, options.only = 1, None
            results, failures = rounds.compare(
                __file__, ["pixels"], options, "--scratch", str(scratch)
            )
            difference = measurements.numbers(results, "pixels", "mean_difference_of_255")
            measurements.write(
                options.results / f"{name}-pixels.json",
                f"Our pixels against PIL's: {what}",
                f"{COMPARED} crops of at least {options.min_area:g} of the area, box for box.",
                measurements.measured(
                    results, failures, [measurements.goal("mean difference", "<= 0.05", difference)]
                ),
            )
            return
        names = [*CONTENDERS, *UINT8]
        results, failures = rounds.compare(__file__, names, options, "--scratch", str(scratch))
        measurements.relate(results, "cpu_ms", names, "pil-v1")
        measurements.relate(results, "cpu_ms", UINT8, "pil-v1:uint8")
        for kind in ("", ":uint8"):
            for peer in best_peer(results, kind):
                measurements.relate(results, "cpu_ms", [f"ours{kind}"], peer)
        for form in ("", "-prepared-raw"):
            measurements.relate(results, "cpu_ms", [f"bare{form}:uint8"], f"ours{form}:uint8")
        size = pictures.average_bytes(scratch / "long")
        measurements.write(
            options.results / f"{name}.json",
            f"Loaders alone: {what}, {size // 1000} kB each on average",
            f"{options.images:,} images per round; 2 workers, batches of 64, random crops of at "
            f"least {options.min_area:g} of the area to 224 x 224, flips. float32 batches are "
            "normalized and ready to train on; uint8 batches are for a device that normalizes. "
            "Medians (lowest to highest); ratios are taken within a round.",
            measurements.measured(results, failures, goals(results)),
        )


def contend(options: argparse.Namespace) -> None:
    """Be one of the contenders, in a process of its own."""
    warnings.simplefilter("ignore")  # such as that there is no GPU to pin memory for
    task = Task(
        options.scratch / "long",
        options.scratch,
        min_area=options.min_area,
        ready=not options.contender.endswith(":uint8"),
    )
    pictures.warm(task.root)
    if options.contender == "pixels":
        rounds.give(pixel_differences, task)
        return
    batches = (CONTENDERS | UINT8)[options.contender](task)
    rounds.give(measure, batches, options.images // task.batch, task)


def make_long(options: argparse.Namespace, scratch: Path, count: int) -> str:
    """Make the folder `long`, an epoch of which is longer than a measurement; what it is of."""
    scratch.mkdir(parents=True, exist_ok=True)
    if not (scratch / "long").exists():
        root = options.root or pictures.generate(scratch / "photographs", options.distinct)
        pictures.lengthen(root.resolve(), scratch / "long", count)
    return options.root.resolve().name if options.root else "generated photographs, 500 x 375"


if __name__ == "__main__":
    main()
