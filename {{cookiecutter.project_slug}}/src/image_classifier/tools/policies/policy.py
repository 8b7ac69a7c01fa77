"""TrivialAugment and RandAugment on whole batches, on the device.

An operation is a function of images, (count, side, side, channels) uint8, which it may overwrite,
and of a magnitude for each, (count,) float32. It makes of them what torchvision's makes of one
image at a time. To add one: a function, and its row in `OPERATIONS`. One function may be several
operations, each with a magnitude of its own, which is 0 for images that have another of them. On a
GPU, where each kernel costs a launch, `JOINED` makes one function of several.

Which images have which operations: `color` needs 3 channels; without them gray is the mean of the
channels. Those of `OF_BYTES` count or cut levels of 8 bits; images of 16 bits, whole numbers in
float32 here, have the others: geometry, brightness, color, contrast, sharpness.
"""

import math
import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...config import AugmentConfig

DRAWS = 3  # for an operation on an image: which one, how strong, its sign
BINS = 31  # strengths
CACHED = 2**19  # numbers that an operation works on at once, on a CPU
LARGE = 2**17  # numbers of an image from which a CPU is faster with one at a time
# The magnitudes of strength 0 and of the largest: slopes, pixels, degrees, shares to blend, bits to
# keep, shares of the range of a number. RandAugment's pixels are shares of the side.
TRIVIAL = {"shear": 0.99, "move": 32.0, "turn": 135.0, "blend": 0.99, "bits": 2.0}
RAND = {"shear": 0.3, "move": 150 / 331, "turn": 30.0, "blend": 0.9, "bits": 4.0}
AT_ZERO = {"bits": 8.0, "threshold": 1.0}
GRAY = 0.2989, 0.587, 0.114  # of red, green and blue, by ITU-R BT.601


def open_policy(augment: AugmentConfig, channels: int, bits: int) -> "Policy | None":
    """What `--augment.policy` does to images of so many channels and bits; None if it is none."""
    return Policy(augment.policy, channels, bits) if augment.policy != "none" else None


class Policy:
    """Random operations on each image, drawn by the host, so it never waits for the device.

    TrivialAugment (https://arxiv.org/abs/2103.10158) is one operation of any strength;
    RandAugment (https://arxiv.org/abs/1909.13719) several of the same strength.
    """

    def __init__(self, name: str, channels: int = 3, bits: int = 8) -> None:
        """`name` is trivialaugment or, for two operations of strength 9, randaugment-m9-n2."""
        options = dict(re.findall(r"-([mn])(\d+)", name))
        self.is_trivial = name == "trivialaugment"
        self.rounds = 1 if self.is_trivial else int(options.get("n", 2))
        self.strength = int(options.get("m", 9))
        self.num_draws = self.rounds * DRAWS  # for each image
        self.key = 3  # of its draws: a stream that no other has
        self.bits = bits
        left_out = (color,) * (channels != 3) + OF_BYTES * (bits != 8)
        numbers = [n for n, (operation, _) in enumerate(OPERATIONS) if operation not in left_out]
        self.allowed = torch.tensor(numbers)

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Change `images`, (batch, side, side, channels) whole numbers or float32, contiguous.

        `draws` is (batch, num_draws), from 0 to 1, on the CPU. Returns uint8 or, of 16 bits, whole
        numbers in float32.
        """
        if self.bits == 16:
            images = images.float().round()
        elif images.is_floating_point():
            images = to_bytes(images.round())
        table = magnitude_table(self.is_trivial, images.shape[1])
        for operation, strength, sign in draws.unflatten(1, (-1, DRAWS)).permute(1, 2, 0):
            which = self.allowed[(operation * len(self.allowed)).long()]
            bins = (strength * BINS).long() if self.is_trivial else self.strength
            magnitude = table[which, bins]
            is_negative = (sign < 0.5) & torch.tensor(SIGNED)[which]
            images = apply_grouped(images, which, torch.where(is_negative, -magnitude, magnitude))
        return images


@cache
def magnitude_table(is_trivial: bool, side: int) -> Tensor:
    """Those of each operation and strength, for images of `side`: (operations, BINS) float32."""
    largest = TRIVIAL if is_trivial else RAND | {"move": RAND["move"] * side}
    ends = [(AT_ZERO.get(kind, 0.0), largest.get(kind, 0.0)) for _, kind in OPERATIONS]
    return torch.stack([torch.linspace(*pair, BINS) for pair in ends])


def apply_grouped(images: Tensor, which: Tensor, magnitudes: Tensor) -> Tensor:
    """Apply to each image the operation of number `which` (batch,).

    `which` and `magnitudes` are on the CPU.
    """
    if images.device.type != "cpu":
        return apply_at_once(images, which, magnitudes)
    size = images[0].numel()
    columns = ON_CPU.columns(which, magnitudes)
    if size >= LARGE:
        alone = images.contiguous().split(1)
        each = zip(alone, which.tolist(), columns.split(1, dim=1), strict=True)
        return torch.cat([ON_CPU.apply(FUNCTION_OF[n], image, own) for image, n, own in each])
    order, counts = ON_CPU.sort(which)
    groups = zip(
        ON_CPU.functions, order.split(counts), columns[:, order].split(counts, dim=1), strict=True
    )
    changed = torch.empty_like(images)
    words = torch.uint8 if size % 8 else torch.int64  # 8 x fewer to copy
    for operation, *group in groups:
        # A few images at a time, so that what an operation makes of them stays in its cache.
        pieces = (tensor.split(CACHED // size, dim=-1) for tensor in group)
        for rows, own in zip(*pieces, strict=True) if len(group[0]) else ():
            result = ON_CPU.apply(operation, images.index_select(0, rows), own)
            result = result.flatten(1).view(words)
            changed.flatten(1).view(words).index_copy_(0, rows, result)
    return changed


def apply_at_once(images: Tensor, which: Tensor, magnitudes: Tensor) -> Tensor:
    """`apply_grouped` in few kernels: all images of a function together, wherever they are."""
    order, counts = ON_GPU.sort(which)
    columns = ON_GPU.columns(which, magnitudes)[:, order]
    places = torch.stack((order, order.argsort())).int()
    packed = torch.cat((places, columns.view(torch.int32)))  # one to copy
    if images.is_cuda:
        packed = packed.pin_memory()
    # Elsewhere the host must wait: https://github.com/pytorch/pytorch/issues/189690
    packed = packed.to(images.device, non_blocking=images.is_cuda)
    groups = zip(
        ON_GPU.functions,
        images.index_select(0, packed[0]).split(counts),
        packed[2:].view(torch.float32).split(counts, dim=1),
        strict=True,
    )
    changed = [ON_GPU.apply(operation, part, own) for operation, part, own in groups if len(part)]
    together = torch.cat(changed)
    del groups, changed  # and the images that they were made of
    return together.index_select(0, packed[1])


def identity(images: Tensor, _: Tensor) -> Tensor:
    """The images as they are."""
    return images


def shift_or_shear_x(images: Tensor, slopes: Tensor, right: Tensor, down: Tensor) -> Tensor:
    """Shear and translate: move each row by its distance from the upper border times a slope.

    And all of them by whole pixels; black where there is none.
    """
    count, height, width, channels = images.shape
    rows = torch.arange(height, device=images.device) - down.long()[:, None]
    columns = shear(slopes, height) - right.trunc()[:, None]
    # Between rows as many black pixels, so that a window on a row may begin outside of it.
    spaced = images.new_zeros((count * height + 1, 2, width, channels))
    spaced[:-1, 1] = images.flatten(0, 1)
    wrapped = rows % height
    columns = columns.long().masked_fill_(wrapped != rows, width).clamp_(-width, width)
    numbers = torch.arange(count, device=images.device)[:, None] * height + wrapped
    size = (2 * width * count * height + 1, channels * width)
    windows = spaced.view(-1).as_strided(size, (channels, 1))
    starts = numbers * (2 * width) + width + columns
    return windows.index_select(0, starts.flatten()).view_as(images)


def rotate_or_shear_y(
    images: Tensor,
    slopes: Tensor,
    degrees: Tensor,
    down: Tensor | None = None,
    left: Tensor | None = None,
) -> Tensor:
    """Shear: move each column by its distance from the left border times a slope.

    Or turn counterclockwise about the middle. The nearest pixel; black where there is none.
    Or, of images that have neither, move whole rows: all of them by `down`, (count,), each by
    `left`, (count, height).
    """
    count, height, width, channels = images.shape
    y = middle_out(height, images.device)[:, None]
    x = middle_out(width, images.device)
    from_left = torch.arange(0.5, width, device=images.device)
    angle = (degrees * (math.pi / 180))[:, None, None]
    sin, cos = angle.sin(), angle.cos()
    y, x = y * cos + (x * sin + slopes[:, None, None] * from_left), x * cos - y * sin
    y = y.add_(height / 2 - 0.5).round_()
    x = x.add_(width / 2 - 0.5).round_()
    if down is not None:
        y.sub_(down[:, None, None])
        x.add_(left[:, :, None])
    # All that is outside is the frame.
    framed = images.new_zeros((count, height + 2, width + 2, channels))
    framed[:, 1:-1, 1:-1] = images
    y.clamp_(-1, height)
    x.clamp_(-1, width)
    area = (height + 2) * (width + 2)
    begin = width + 3  # the first pixel within the frame
    end = begin + count * area
    begins = torch.arange(begin, end, area, dtype=torch.int32, device=images.device)
    places = y.mul_(width + 2).add_(x).int() + begins[:, None, None]
    return framed.view(-1, channels).index_select(0, places.flatten()).view_as(images)


def warp(  # noqa: PLR0917 - a column for each operation
    images: Tensor, slopes_x: Tensor, slopes_y: Tensor, right: Tensor, down: Tensor, degrees: Tensor
) -> Tensor:
    """`shift_or_shear_x` and `rotate_or_shear_y` in one: an image has one of the five."""
    left = shear(slopes_x, images.shape[1]) - right.trunc()[:, None]
    return rotate_or_shear_y(images, slopes_y, degrees, down.trunc(), left)


def shear(slopes: Tensor, height: int) -> Tensor:
    """By how many pixels to the left each row moves: (count, height) float32."""
    return (slopes[:, None] * torch.arange(0.5, height, device=slopes.device)).round_()


def middle_out(size: int, device: torch.device) -> Tensor:
    """The distances of the centers of pixels from the middle: (size,) float32."""
    return torch.arange((1 - size) / 2, (1 + size) / 2, device=device)


def brightness(images: Tensor, change: Tensor) -> Tensor:
    """Blend with black; `change` is -1 for black, 0 for the image itself, 1 for twice as bright."""
    rows = images.flatten(2).float().mul_(1 + change[:, None, None])
    return in_range(rows, images).view_as(images)


def color(images: Tensor, change: Tensor) -> Tensor:
    """Blend with the gray image."""
    numbers = images.float()
    gray = luminance(numbers, copies=3).expand_as(numbers).flatten(2)
    return in_range(blend(numbers, gray, change), images).view_as(images)


def contrast(images: Tensor, change: Tensor) -> Tensor:
    """Blend with the mean gray."""
    numbers = images.float()
    means = luminance(numbers).mean(dim=(1, 2))[:, None]
    return in_range(blend(numbers, means, change), images).view_as(images)


def sharpness(images: Tensor, change: Tensor) -> Tensor:
    """Blend with a smoothed image, whose border is that of the image."""
    step = images.shape[3]  # between a channel's neighbors in a row
    rows = images.flatten(2)
    rows = rows.short() if rows.dtype == torch.uint8 else rows
    columns = (rows[:, :-2] + rows[:, 1:-1]).add_(rows[:, 2:])
    smooth = columns[:, :, : -2 * step] + columns[:, :, step:-step]
    smooth += columns[:, :, 2 * step :]
    middle = rows[:, 1:-1, step:-step]
    smooth = smooth.add_(middle, alpha=4).float().mul_(1 / 13).round_()
    middle = images.flatten(2)[:, 1:-1, step:-step].float()
    changed = images.clone()
    sharper = torch.sub(middle, smooth, out=smooth).mul_(change[:, None, None]).add_(middle)
    changed.flatten(2)[:, 1:-1, step:-step] = in_range(sharper, images)
    return changed


def mix_grays(images: Tensor, bright: Tensor, colored: Tensor, contrasted: Tensor) -> Tensor:
    """`brightness`, `color` and `contrast` in one: an image has one of the three."""
    numbers = images.float()
    gray = luminance(numbers)
    means = gray.mean(dim=(1, 2), keepdim=True)
    others = gray * colored[:, None, None, None] + means * contrasted[:, None, None, None]
    change = bright + colored + contrasted
    return in_range(numbers.mul_(1 + change[:, None, None, None]).sub_(others), images)


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    """Keep the highest bits of each number."""
    return images & (0xFF << (8 - bits.round().int())).byte()[:, None, None, None]


def solarize(images: Tensor, threshold: Tensor) -> Tensor:
    """Invert the brightest numbers: those from 255 * threshold on."""
    rows = images.flatten(2)
    lowest = (255 * threshold).ceil().byte()[:, None, None].expand(-1, 1, rows.shape[2])
    return (rows ^ (rows >= lowest.contiguous()).byte().neg_()).view_as(images)


def autocontrast(images: Tensor, _: Tensor) -> Tensor:
    """Stretch each channel to 0 .. 255."""
    rows = images.flatten(2)
    pixels = (-1, images.shape[3])
    low = rows.amin(1).unflatten(1, pixels).amin(1).float()
    high = rows.amax(1).unflatten(1, pixels).amax(1).float()
    is_flat = low == high
    low = low.masked_fill(is_flat, 0.0)
    scale = ((high - low) * (1 / 255)).masked_fill(is_flat, 1.0)
    low = for_row(low, images)
    scale = for_row(scale, images)
    return to_bytes(rows.float().sub_(low).div_(scale)).view_as(images)


def equalize(images: Tensor, _: Tensor) -> Tensor:
    """Make the values of each channel equally frequent, as Pillow's `ImageOps.equalize`."""
    channels = images.shape[3]
    tables = channels * len(images)
    first = torch.arange(0, 256 * tables, 256, dtype=torch.int32, device=images.device)
    first = for_row(first.view(-1, channels), images)
    places = images.flatten(2).int().add_(first).flatten()
    if images.device.type == "cpu":
        counts = places.bincount(minlength=256 * tables)
    else:  # where bincount waits for the device
        one = torch.ones((), dtype=torch.int32, device=images.device)
        counts = torch.zeros(256 * tables, dtype=torch.int32, device=images.device)
        counts.index_add_(0, places, one.expand(len(places)))
    counts = counts.view(tables, 256)
    below = counts.cumsum(1)
    brightest = counts.gather(1, below.argmax(1, keepdim=True))
    step = (below[:, -1:] - brightest) // 255
    table = ((below - counts + step // 2) // step.clamp(min=1)).clamp(0, 255)
    table = torch.where(step > 0, table, torch.arange(256, device=images.device)).byte()
    return table.flatten().index_select(0, places).view_as(images)


def for_row(values: Tensor, images: Tensor) -> Tensor:
    """Values of each channel, (count, channels), for every pixel of a row of `images`.

    (count, 1, side * channels).
    """
    return values[:, None, None].expand(-1, 1, images.shape[2], -1).flatten(2)


def blend(numbers: Tensor, others: Tensor, change: Tensor) -> Tensor:
    """Return numbers * (1 + change) - others * change: (count, side, channels * side) float32.

    It overwrites both; `others` is broadcast.
    """
    change = change[:, None, None]
    return numbers.flatten(2).mul_(1 + change).sub_(others.mul_(change))


def in_range(numbers: Tensor, images: Tensor) -> Tensor:
    """Numbers cut off to the range of `images`, and of their type."""
    return to_bytes(numbers) if images.dtype == torch.uint8 else numbers.trunc().clamp_(0, 65535)


def to_bytes(numbers: Tensor) -> Tensor:
    """Numbers cut off to 0 .. 255, as uint8; on a CPU by way of 16 bits, which is 2 x faster."""
    numbers = numbers.short() if numbers.device.type == "cpu" else numbers
    return numbers.clamp_(0, 255).byte()


def luminance(numbers: Tensor, copies: int = 1) -> Tensor:
    """Gray images, (count, side, side, copies) float32 whole numbers; on a GPU with one channel."""
    if numbers.shape[3] != 3:
        return numbers.mean(3, keepdim=True).floor_()
    if numbers.device.type != "cpu":  # which may round a product of matrices to TF32
        red, green, blue = numbers.unbind(3)
        return (GRAY[0] * red + GRAY[1] * green + GRAY[2] * blue).floor_()[..., None]
    together = math.gcd(numbers[..., 0].numel(), 4)  # pixels: one alone leaves vector units idle
    gray = numbers.view(-1, 3 * together) @ gray_matrix(together, copies)
    return gray.floor_().view(*numbers.shape[:3], copies)


@cache
def gray_matrix(pixels: int, copies: int) -> Tensor:
    """What makes gray numbers of `pixels` in a row: (3 * pixels, copies * pixels) float32."""
    weights = torch.tensor(GRAY)[:, None].expand(3, copies)
    return torch.block_diag(*[weights] * pixels)


# Each with the kind of its magnitude.
OPERATIONS = (
    (identity, ""),
    (shift_or_shear_x, "shear"),
    (rotate_or_shear_y, "shear"),
    (shift_or_shear_x, "move"),
    (shift_or_shear_x, "move"),
    (rotate_or_shear_y, "turn"),
    (brightness, "blend"),
    (color, "blend"),
    (contrast, "blend"),
    (sharpness, "blend"),
    (posterize, "bits"),
    (solarize, "threshold"),
    (autocontrast, ""),
    (equalize, ""),
)
OF_BYTES = (posterize, solarize, autocontrast, equalize)
SIGNED = [kind not in ("", "bits", "threshold") for _, kind in OPERATIONS]
FUNCTION_OF = [operation for operation, _ in OPERATIONS]
# One function in place of several, where an image has one of them: in the order of `OPERATIONS`.
JOINED: dict[Callable[..., Tensor], Callable[..., Tensor]] = {
    shift_or_shear_x: warp,
    rotate_or_shear_y: warp,
    brightness: mix_grays,
    color: mix_grays,
    contrast: mix_grays,
}


class Grouping(NamedTuple):
    """The functions that do the operations, and which one does each."""

    functions: Counter[Callable[..., Tensor]]  # the number of magnitudes of each
    function: Tensor  # (operations,) int64: its number
    column: Tensor  # (operations,) int64: which of its magnitudes is that of the operation

    @classmethod
    def of(cls, functions: list[Callable[..., Tensor]]) -> "Grouping":
        """Of the function of each operation."""
        counts = Counter(functions)
        number = torch.tensor([[*counts].index(function) for function in functions])
        column = torch.tensor([functions[:n].count(one) for n, one in enumerate(functions)])
        return cls(counts, number, column)

    def columns(self, which: Tensor, magnitudes: Tensor) -> Tensor:
        """The magnitudes as those of a function, the others 0: (most of a function, batch)."""
        empty = torch.zeros(max(self.functions.values()), len(which))
        return empty.scatter_(0, self.column[which][None], magnitudes[None])

    def sort(self, which: Tensor) -> tuple[Tensor, list[int]]:
        """The images (batch,) in the order of their functions, and how many each function has."""
        function = self.function[which]
        return function.argsort(), function.bincount(minlength=len(self.functions)).tolist()

    def apply(self, operation: Callable[..., Tensor], images: Tensor, columns: Tensor) -> Tensor:
        """`operation` of `images` with those of `columns`, (most, count), that it takes."""
        return operation(images, *columns[: self.functions[operation]])


ON_CPU = Grouping.of(FUNCTION_OF)
ON_GPU = Grouping.of([JOINED.get(function, function) for function in FUNCTION_OF])
