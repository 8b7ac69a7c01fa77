# ruff: noqa: PLC0415 - a contender's process imports what that contender needs, and nothing else
"""Small images in memory: batches of 512 images of 32 x 32, ready to train on.

    python benchmarks/resident.py                   # generated pixels: as many as CIFAR-10 has
    python benchmarks/resident.py --root FOLDER     # yours: FOLDER/train/<class>/, 32 x 32 pixels
    python benchmarks/resident.py --rounds 1 --seconds 2      # a quick look

Everybody shifts each image by up to 4 pixels, mirrors every other one, and normalizes: float32 out.
`dataloader-pil` is what is usually written for CIFAR-10: a DataLoader with two workers, and PIL
transforms for each image. `dataloader-v2` is the same with torchvision's v2 transforms on tensors.
`ours` is what `train` does where images are resident: batches of `TrainData`, then `augment`.

Prints and writes `results/resident.json` (`resident-<folder>.json` with `--root`).
"""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import measurements
import project
import rounds

ABOUT = "augment data/batch data/loader data/gather data/samples data/splits"

COUNT, SIDE, BATCH, WORKERS = 50_000, 32, 512, 2
PAD = SIDE // 8  # of `--augment.crop pad`
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
SKIPPED = 16  # batches before the clock starts
LOOK_EVERY = 32  # batches between two looks at the clock


def load(root: Path | None) -> tuple[Any, Any]:
    """Pixels, (count, 32, 32, 3) uint8, and labels, as NumPy arrays; generated without a `root`."""
    import numpy as np
    from PIL import Image

    if root is None:
        chance = np.random.default_rng(0)
        pixels = chance.integers(0, 256, (COUNT, SIDE, SIDE, 3), dtype=np.uint8)
        return pixels, np.arange(COUNT) % 10
    folders = sorted(path for path in (root / "train").iterdir() if path.is_dir())
    files = [(path, label) for label, folder in enumerate(folders) for path in folder.iterdir()]
    pixels = np.stack([np.asarray(Image.open(path).convert("RGB")) for path, _ in files])
    return pixels, np.array([label for _, label in files])


class Images:
    """A dataset as torchvision's CIFAR10 is: an array, made a PIL image for each sample."""

    def __init__(self, root: Path | None, transform: Callable, as_image: Callable) -> None:
        """Images that `as_image` makes of their pixels, transformed."""
        self.pixels, labels = load(root)
        self.labels = labels.tolist()
        self.transform, self.as_image = transform, as_image

    def __len__(self) -> int:
        """How many images there are."""
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        """Image and label."""
        return self.transform(self.as_image(self.pixels[index])), self.labels[index]


def loaded(dataset: Images) -> Iterator[tuple[Any, Any]]:
    """Batches of a DataLoader, in random order, without an end between epochs."""
    from torch.utils.data import DataLoader, RandomSampler

    sampler = RandomSampler(dataset, num_samples=2**40)
    loader = DataLoader(dataset, BATCH, sampler=sampler, num_workers=WORKERS, pin_memory=True)
    return iter(loader)


def dataloader_pil(root: Path | None) -> Iterator[tuple[Any, Any]]:
    """PIL transforms, image by image."""
    from PIL import Image
    from torchvision import transforms

    transform = transforms.Compose(
        [
            transforms.RandomCrop(SIDE, padding=PAD),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )
    return loaded(Images(root, transform, Image.fromarray))


def dataloader_v2(root: Path | None) -> Iterator[tuple[Any, Any]]:
    """The transforms of v2 on tensors, image by image."""
    import torch
    from torchvision.transforms import v2

    transform = v2.Compose(
        [
            v2.RandomCrop(SIDE, padding=PAD),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ]
    )
    return loaded(Images(root, transform, lambda pixels: torch.from_numpy(pixels).permute(2, 0, 1)))


def ours(root: Path | None) -> Iterator[tuple[Any, Any]]:
    """Resident images of ours, gathered and augmented a batch at a time."""
    import torch

    pixels, labels = (torch.from_numpy(array) for array in load(root))
    project.offer_pixels("array", pixels, labels, mean=MEAN, std=STD)
    return project.input_batches(build_config())


def build_config() -> Any:  # noqa: ANN401 - a config
    """Shifts and flips of images in memory, in float32."""
    return project.build_config(
        data={"name": "array", "image_size": SIDE, "batch_size": BATCH, "where": "device"},
        augment={"crop": "pad", "flip": "random"},
    )


CONTENDERS: dict[str, Callable[[Path | None], Iterator[tuple[Any, Any]]]] = {
    "dataloader-pil": dataloader_pil,
    "dataloader-v2": dataloader_v2,
    "ours": ours,
}


def measure(batches: Iterator[tuple[Any, Any]], seconds: float) -> dict[str, float]:
    """Images per second, and CPU microseconds per image, over so many seconds."""
    for _ in range(SKIPPED):
        images, _ = next(batches)
    count, began = 0, rounds.Reading.now()
    while (took := rounds.Reading.now().since(began)).seconds < seconds:
        for _ in range(LOOK_EVERY):
            images, _ = next(batches)
        count += LOOK_EVERY * BATCH
    assert tuple(images.shape) == (BATCH, 3, SIDE, SIDE), images.shape
    assert str(images.dtype) == "torch.float32", images.dtype
    return {"images_per_second": count / took.seconds, "cpu_us": 1e6 * took.cpu_seconds / count}


def main() -> None:
    """Compare."""
    parser = rounds.parser(__doc__, rounds=7)
    parser.add_argument("--root", type=Path, help="folder with train/<class>/; default: generated")
    parser.add_argument("--seconds", type=float, default=8.0, help="timed per round (8)")
    options = parser.parse_args()
    if options.contender:
        warnings.simplefilter("ignore")  # such as that there is no GPU to pin memory for
        rounds.give(measure, CONTENDERS[options.contender](options.root), options.seconds)
        return
    results, failures = rounds.compare(__file__, CONTENDERS, options)
    what = options.root.resolve().name if options.root else f"{COUNT:,} generated images"
    measurements.relate(results, "images_per_second", CONTENDERS, "dataloader-pil")
    ratio = measurements.numbers(results, "ours", "images_per_second x dataloader-pil")
    measurements.write(
        options.results / (f"resident-{what}.json" if options.root else "resident.json"),
        f"Small images in memory: {what}, batches of {BATCH}",
        f"{options.seconds:g} s per round; crops after padding by {PAD}, flips, normalized float32 "
        "out. Medians (lowest to highest); ratios are taken within a round.",
        measurements.measured(
            results,
            failures,
            [measurements.goal("images/s of ours to those of dataloader-pil", ">= 20", ratio)],
        ),
    )


if __name__ == "__main__":
    main()
