"""Ten shapes, drawn on the spot: a dataset that needs no download and is the same everywhere.

An image is a function of its number alone, in integers: no machine can round it differently.
"""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor, maximum, minimum

from ...config import DataConfig
from ...errors import UserError, choose
from ...runtime.machine import one_thread
from ...runtime.seeding import hash64
from .parts import check_own
from .source import Source

SPLITS = {"train": range(20_000), "val": range(20_000, 24_000), "test": range(24_000, 28_000)}
SIDE = 32  # of an image, in pixels
PIXEL = 16  # what places and sizes are counted in: sixteenths of a pixel
LINE = torch.arange(SIDE, dtype=torch.int32) * PIXEL - (SIDE - 1) * PIXEL // 2  # of pixels' centers
UNIT = 1024  # the radius of a shape in its own coordinates
TURN = 256  # a full one; angles are counted in parts of it
# 4096 times the sine. The last bit of a platform's sine is far too small to change an entry.
SINES = [round(4096 * math.sin(2 * math.pi * turn / TURN)) for turn in range(TURN)]
SINES = torch.tensor(SINES, dtype=torch.int32)
CHUNK = 100  # images that are drawn together, so that they stay in the processor's cache


def disc(u: Tensor, v: Tensor, radius: int = UNIT) -> Tensor:
    """All that is near; exact at the edge, where r^2 - d^2 = (r + d)(r - d) is about 2r (r - d)."""
    return (radius * radius - u * u - v * v) >> 11


def square(u: Tensor, v: Tensor, half: int = 830) -> Tensor:
    """Four sides, each `half` from the middle."""
    return half - maximum(u.abs(), v.abs())


def star(u: Tensor, v: Tensor) -> Tensor:
    """Five points; a mirror at 36 degrees, used twice, lays them all on the upper one."""
    u = u.abs()
    for _ in range(2):
        beyond = ((u * 828 + v * 602) >> 10).clamp(min=0)
        u, v = (u - (beyond * 1657 >> 10)).abs(), v - (beyond * 1204 >> 10)
    return 400 - ((u * 940 - v * 400) >> 10)


# How deep a point lies within a shape: 0 on the edge, negative outside. `u` is to the right of its
# middle and `v` below; the minimum of two depths is what both shapes cover, the maximum what either
# does, and a shape with the sign changed is all but that.
Shape = Callable[[Tensor, Tensor], Tensor]
SHAPES: dict[str, Shape] = {
    "disc": disc,
    "ring": lambda u, v: minimum(disc(u, v), -disc(u, v, 600)),
    "square": square,
    "frame": lambda u, v: minimum(square(u, v), -square(u, v, 440)),
    "triangle": lambda u, v: 560 - maximum(v, (u.abs() * 887 - v * 512) >> 10),
    "cross": lambda u, v: minimum(square(u, v, UNIT), 300 - minimum(u.abs(), v.abs())),
    "star": star,
    "crescent": lambda u, v: minimum(disc(u, v), -disc(u - 450, v, 850)),
    "heart": lambda u, v: maximum(
        (800 - u.abs() - (v + 100).abs()) * 724 >> 10, disc(u.abs() - 400, v + 500, 566)
    ),
    "arrow": lambda u, v: maximum(
        minimum(-v, (UNIT + v - u.abs()) * 724 >> 10), minimum(260 - u.abs(), 900 - v.abs())
    ),
}
# What lies about: the last is a stroke, no class.
CLUTTER = (disc, square, lambda u, v: minimum(400 - u.abs(), 4000 - v.abs()))


def shapes(data: DataConfig, split: str) -> Source:
    """Images of shapes, the classes in turn.

    Raises:
        UserError: for a split that there is not, or a folder, of which nothing would be read.
    """
    if data.root != DataConfig.root:
        raise UserError(
            f"--data.root {data.root!a}: the dataset shapes is drawn and reads no files; "
            "the presets folder and finetune read your own images"
        )
    check_own({"val": "val", "test": "test"}, "shapes", data, split)
    of_split = choose("split of shapes", split, SPLITS)
    numbers = torch.arange(of_split.start, of_split.stop)[: data.limit or None]
    labels = numbers % len(SHAPES)
    pixels = torch.empty(len(numbers), SIDE, SIDE, 3, dtype=torch.uint8)

    def draw_class(label: int, shape: Shape) -> None:
        own = (tensor[label :: len(SHAPES)].split(CHUNK) for tensor in (pixels, numbers))
        for images, chunk in zip(*own, strict=True):
            draw(images, shape, chunk)

    # Threads with classes of their own never wait for each other, as those do that share in one
    # operation: where other programs keep the cores busy, that takes 30 times as long.
    threads = torch.get_num_threads()
    with one_thread(), ThreadPoolExecutor(threads) as pool:
        list(pool.map(draw_class, range(len(SHAPES)), SHAPES.values()))
    mean = (0.496, 0.496, 0.494)
    return Source(labels, tuple(SHAPES), pixels, mean=mean, std=(0.198, 0.199, 0.199))


def draw(images: Tensor, shape: Shape, numbers: Tensor) -> None:
    """Fill `images`, (count, SIDE, SIDE, 3) uint8, with one of `shape` for each of `numbers`."""
    words = hashed(numbers[:, None] * 2048 + torch.arange(SIDE * SIDE + 64))
    grain, dice = words.split((SIDE * SIDE, 64), dim=1)
    dice = iter(dice.unbind(1))

    def pick(low: int, high: int) -> Tensor:
        """A number from `low` to `high` for each image."""
        return (low + next(dice) % (high - low + 1)).int().view(-1, 1, 1, 1)

    def color(low: int, high: int) -> Tensor:
        return torch.cat([pick(low, high) for _ in range(3)], dim=1)

    def local(size: Tensor, reach: int, lean: int) -> tuple[Tensor, Tensor]:
        """Coordinates about a point up to `reach` from the middle, turned by up to `lean`."""
        x = LINE - pick(-reach, reach)
        y = LINE.view(-1, 1) - pick(-reach, reach)
        turn = pick(-lean, lean)
        sine = SINES[turn % TURN] * UNIT // size
        cosine = SINES[(turn + TURN // 4) % TURN] * UNIT // size
        return (cosine * x + sine * y) >> 12, (cosine * y - sine * x) >> 12

    def paint(shape: Shape, size: Tensor, reach: int, lean: int, tint: Tensor) -> None:
        depth = shape(*local(size, reach, lean)) * size // (UNIT // 16)  # in 1/256 of a pixel
        canvas.add_((tint - canvas) * (depth + 128).clamp_(0, 256) >> 8)

    ground = color(64, 191)
    wave, _ = local(pick(4 * PIXEL, 40 * PIXEL), SIDE * PIXEL // 2, TURN // 2)
    canvas = ground + (color(-48, 48) * ((wave & 2047) - 1024).abs() >> 10)
    tint = ground + color(28, 100) * (2 * color(0, 1) - 1)
    paint(shape, pick(7 * PIXEL, 12 * PIXEL), 4 * PIXEL, TURN // 10, tint)
    for clutter in CLUTTER:
        paint(clutter, pick(3 * PIXEL // 2, 3 * PIXEL), 14 * PIXEL, TURN // 2, color(32, 223))
    grain = grain[:, None] >> torch.tensor([[0], [8], [16]]) & 255
    noise = (grain.int().view_as(canvas) - 128) * pick(4, 48)
    images.copy_((canvas + (noise >> 7)).clamp_(0, 255).permute(0, 2, 3, 1))


def hashed(places: Tensor) -> Tensor:
    """32 random bits for each of `places`, by its value alone: (...) int64."""
    step = np.uint64(0x9E3779B97F4A7C15)  # of SplitMix64, which `hash64` adds
    words = hash64((places.numpy().astype(np.uint64) - np.uint64(1)) * step) >> np.uint64(32)
    return torch.from_numpy((words ^ words >> np.uint64(31)).astype(np.int64))
