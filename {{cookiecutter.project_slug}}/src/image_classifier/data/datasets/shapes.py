"""Ten shapes, drawn on the spot: a dataset that needs no download and is the same everywhere.

An image is a function of its number alone, in integers: no machine can round it differently.
To add a class: a function of its own here, and its name in `SHAPES`.

A shape is a function of local coordinates, `u` to the right and `v` down, in which its radius is
`UNIT`. It gives how deep a point lies within the shape: 0 on the edge, negative outside.
"""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from ...config import DataConfig
from ...errors import UserError, choose
from ...runtime.machine import one_thread
from ...runtime.seeding import hash64
from .source import Source

SPLITS = {"train": range(20_000), "val": range(20_000, 24_000), "test": range(24_000, 28_000)}
SIDE = 32  # of an image, in pixels
PIXEL = 16  # what places and sizes are counted in: sixteenths of a pixel
UNIT = 1024
TURN = 256  # a full one; angles are counted in parts of it
# 4096 times the sine. The last bit of a platform's sine is far too small to change an entry.
SINES = torch.tensor([round(4096 * math.sin(2 * math.pi * turn / TURN)) for turn in range(TURN)])
CHUNK = 100  # images that are drawn together, so that they stay in the processor's cache


def disc(u: Tensor, v: Tensor, radius: int = UNIT) -> Tensor:
    """All that is near; exact at the edge, where r^2 - d^2 = (r + d)(r - d) is about 2r (r - d)."""
    return (radius * radius - u * u - v * v) >> 11


def ring(u: Tensor, v: Tensor) -> Tensor:
    """A disc with a round hole."""
    return torch.minimum(disc(u, v), -disc(u, v, 600))


def square(u: Tensor, v: Tensor) -> Tensor:
    """Four equal sides."""
    return 830 - torch.maximum(u.abs(), v.abs())


def frame(u: Tensor, v: Tensor) -> Tensor:
    """A square with a square hole."""
    depth = square(u, v)
    return torch.minimum(depth, 390 - depth)


def triangle(u: Tensor, v: Tensor) -> Tensor:
    """Three equal sides, of which one lies below."""
    return 560 - torch.maximum(v, (u.abs() * 887 - v * 512) >> 10)


def cross(u: Tensor, v: Tensor) -> Tensor:
    """A plus sign."""
    u, v = u.abs(), v.abs()
    return torch.minimum(UNIT - torch.maximum(u, v), 300 - torch.minimum(u, v))


def star(u: Tensor, v: Tensor) -> Tensor:
    """Five points; a mirror at 36 degrees, used twice, lays them all on the upper one."""
    u = u.abs()
    for _ in range(2):
        beyond = ((u * 828 + v * 602) >> 10).clamp(min=0)
        u, v = (u - (beyond * 1657 >> 10)).abs(), v - (beyond * 1204 >> 10)
    return 400 - ((u * 940 - v * 400) >> 10)


def crescent(u: Tensor, v: Tensor) -> Tensor:
    """A disc that another disc was cut out of."""
    return torch.minimum(disc(u, v), -disc(u - 450, v, 850))


def heart(u: Tensor, v: Tensor) -> Tensor:
    """A square that stands on a corner, with half a disc on each of its upper sides."""
    u, v = u.abs(), v + 100
    return torch.maximum((800 - u - v.abs()) * 724 >> 10, disc(u - 400, v + 400, 566))


def arrow(u: Tensor, v: Tensor) -> Tensor:
    """A triangle on a shaft."""
    u = u.abs()
    head = torch.minimum(-v, (UNIT + v - u) * 724 >> 10)
    return torch.maximum(head, torch.minimum(260 - u, 900 - v.abs()))


def bar(u: Tensor, v: Tensor) -> Tensor:
    """A stroke; no class, but one of the things that lie about."""
    return torch.minimum(400 - u.abs(), 4000 - v.abs())


Shape = Callable[[Tensor, Tensor], Tensor]
SHAPES: dict[str, Shape] = {
    shape.__name__: shape
    for shape in (disc, ring, square, frame, triangle, cross, star, crescent, heart, arrow)
}


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
    of_split = choose("split of shapes", split, SPLITS)
    numbers = torch.arange(of_split.start, of_split.stop)[: data.limit or None]
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
    return Source(
        labels=numbers % len(SHAPES),
        classes=tuple(SHAPES),
        pixels=pixels,
        mean=(0.496, 0.496, 0.494),
        std=(0.198, 0.199, 0.199),
    )


def draw(images: Tensor, shape: Shape, numbers: Tensor) -> None:
    """Fill `images`, (count, SIDE, SIDE, 3) uint8, with one of `shape` for each of `numbers`."""
    words = hashed(numbers[:, None] * 2048 + torch.arange(SIDE * SIDE + 64))
    grain = words[:, : SIDE * SIDE]
    dice = iter(words[:, SIDE * SIDE :].unbind(1))

    def pick(low: int, high: int) -> Tensor:
        """A number from `low` to `high` for each image."""
        return (low + next(dice) % (high - low + 1)).int().view(-1, 1, 1, 1)

    def color(low: int, high: int) -> Tensor:
        return torch.cat([pick(low, high) for _ in range(3)], dim=1)

    def local(size: Tensor, reach: int, lean: int) -> tuple[Tensor, Tensor]:
        """Coordinates about a point up to `reach` from the middle, turned by up to `lean`."""
        line = torch.arange(SIDE, dtype=torch.int32) * PIXEL - (SIDE - 1) * PIXEL // 2
        x, y = line - pick(-reach, reach), line.view(-1, 1) - pick(-reach, reach)
        turn = pick(-lean, lean)
        sine = SINES[turn % TURN] * UNIT // size
        cosine = SINES[(turn + TURN // 4) % TURN] * UNIT // size
        sine, cosine = sine.int(), cosine.int()
        return (cosine * x + sine * y) >> 12, (cosine * y - sine * x) >> 12

    def paint(shape: Shape, size: Tensor, reach: int, lean: int, tint: Tensor) -> None:
        depth = shape(*local(size, reach, lean)) * size // (UNIT // 16)  # in 1/256 of a pixel
        canvas.add_((tint - canvas) * (depth + 128).clamp_(0, 256) >> 8)

    ground = color(64, 191)
    wave = local(pick(4 * PIXEL, 40 * PIXEL), SIDE * PIXEL // 2, TURN // 2)[0]
    canvas = ground + (color(-48, 48) * ((wave & 2047) - 1024).abs() >> 10)
    tint = ground + color(28, 100) * (2 * color(0, 1) - 1)
    paint(shape, pick(7 * PIXEL, 12 * PIXEL), 4 * PIXEL, TURN // 10, tint)
    for clutter in (disc, square, bar):
        size = pick(3 * PIXEL // 2, 3 * PIXEL)
        paint(clutter, size, 14 * PIXEL, TURN // 2, color(32, 223))
    grain = grain[:, None] >> torch.tensor([[0], [8], [16]]) & 255
    noise = (grain.int().view_as(canvas) - 128) * pick(4, 48)
    images.copy_((canvas + (noise >> 7)).clamp_(0, 255).permute(0, 2, 3, 1))


def hashed(places: Tensor) -> Tensor:
    """32 random bits for each of `places`, by its value alone: (...) int64."""
    step = np.uint64(0x9E3779B97F4A7C15)  # of SplitMix64, which `hash64` adds
    words = hash64((places.numpy().astype(np.uint64) - np.uint64(1)) * step) >> np.uint64(32)
    return torch.from_numpy((words ^ words >> np.uint64(31)).astype(np.int64))
