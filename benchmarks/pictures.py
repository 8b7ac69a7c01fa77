"""Image folders to measure on: generated ones, and yours, made as long as a measurement needs."""

from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = 8
PHOTO = (500, 375)  # width and height that ImageNet's photographs have on average, roughly
# Cells across the image, and how strongly they differ: fewer at finer scales, as in nature. With
# the grain, a file of quality 90 has the 110 kB that photographs of this size have.
SCALES = ((4, 60), (12, 35), (48, 18), (160, 21))
GRAIN = 21


def photograph(number: int, size: tuple[int, int] = PHOTO) -> Image.Image:
    """Colored noise of all scales; the same number gives the same image.

    Its class, which is `number % CLASSES`, tints it, so that there is something to learn.
    """
    width, height = size
    chance = np.random.default_rng(number)
    pixels = np.zeros((height, width, 3), np.float32)
    for cells, strength in SCALES:
        noise = chance.normal(size=(cells * 3 // 4 + 1, cells + 1, 3)).astype(np.float32)
        noise = 0.4 * noise + 0.8 * noise[..., :1]  # light differs more than color
        planes = [Image.fromarray(noise[..., channel]).resize(size) for channel in range(3)]
        pixels += strength * np.stack(planes, axis=2)
    tint = np.random.default_rng(number % CLASSES).normal(size=3) * 25
    pixels += chance.normal(size=(height, width, 1)) * GRAIN + 128 + tint
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def scan(number: int, side: int = 256, jitter: float = 0.03) -> Image.Image:
    """A gray, dark, centered picture, such as a slice of a head: skull, tissue, a bright spot.

    All have nearly the same outline, with `jitter` 0 the very same.
    """
    chance = np.random.default_rng(number)
    y, x = np.mgrid[-1 : 1 : side * 1j, -1 : 1 : side * 1j]
    width, height, left, top = (0.62, 0.76, 0, 0) + chance.normal(size=4) * jitter
    x, y = x - left, y - top
    radius = np.hypot(x / width, y / height)
    tissue = np.full((side, side), 70.0)
    for cells, strength in ((6, 12), (14, 8), (40, 6)):
        noise = chance.normal(size=(cells, cells)).astype(np.float32)
        tissue += strength * np.asarray(Image.fromarray(noise).resize((side, side)))
    for middle in (-0.1, 0.1):  # two dark chambers
        tissue -= 45 * np.exp(-((((x - middle) / 0.07) ** 2 + (y / 0.28) ** 2) ** 2))
    angle, out, size = chance.uniform((0, 0.2, 0.06), (2 * np.pi, 0.55, 0.16))
    spot = np.hypot(x - out * width * np.cos(angle), y - out * height * np.sin(angle))
    tissue += 80 * np.exp(-((spot / size) ** 4))
    pixels = np.select([radius < 0.88, radius < 0.93, radius < 1], [tissue, 12, 190], 0)
    pixels = pixels + chance.normal(size=pixels.shape) * 3
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).convert("RGB")


def write_photograph(number: int, folder: Path) -> None:
    """One JPEG in the folder of its class."""
    path = folder / f"class{number % CLASSES}" / f"{number:06}.jpg"
    path.parent.mkdir(parents=True, exist_ok=True)
    photograph(number).save(path, quality=90)


def generate(folder: Path, count: int) -> Path:
    """A folder with `train/<class>/*.jpg`: `count` generated photographs."""
    with ProcessPoolExecutor() as processes:
        write = partial(write_photograph, folder=folder / "train")
        list(processes.map(write, range(count), chunksize=16))
    return folder


def lengthen(root: Path, folder: Path, count: int) -> Path:
    """A folder whose `train` has `count` links to the images of `root/train`, classes in turn.

    So an epoch is longer than a measurement, for every library, and files are few enough to stay
    in the page cache. `val` has the first images once more.
    """
    images = sorted(path for path in (root / "train").glob("*/*") if path.is_file())
    for number in range(count):
        # Steps of a number that is prime to most counts go through all classes early.
        original = images[number * 7919 % len(images)]
        splits = ("train", "val") if number < 64 else ("train",)
        for split in splits:
            link = folder / split / original.parent.name / f"{number:06}{original.suffix}"
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(original.resolve())
    return folder


def training_files(folder: Path) -> list[Path]:
    """All of them, in whatever order."""
    return [path for path in folder.glob("train/**/*") if path.is_file()]


def average_bytes(folder: Path) -> int:
    """How large a training file is."""
    sizes = [path.stat().st_size for path in training_files(folder)]
    return sum(sizes) // len(sizes)


def warm(folder: Path) -> None:
    """Read every training file, so that it is in the page cache.

    Each contender does so: what nobody has read for a while, a system may have let go of.
    """
    for path in training_files(folder):
        path.read_bytes()
