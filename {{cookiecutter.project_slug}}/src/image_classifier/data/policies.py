"""TrivialAugment and RandAugment on whole batches, on the device.

An operation is a function of images, (count, side, side, channels) uint8, which it may overwrite,
and of a magnitude for each, (count,) float32. It makes of them what torchvision's makes of one
image at a time. To add one: a function, and its row in `OPERATIONS`. One function may be several
operations, each with a magnitude of its own, which is 0 for images that have another of them: fewer
kernels to launch on a GPU.

Which images have which operations: `color` needs 3 channels; without them gray is the mean of the
channels. Those of `OF_BYTES` count or cut levels of 8 bits; images of 16 bits, whole numbers in
float32 here, have the others: geometry, brightness, color, contrast, sharpness.
"""

import math
import re
from collections import Counter
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

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
        self.bits = bits
        left_out = (color,) * (channels != 3) + OF_BYTES * (bits != 8)
        numbers = [n for n, (operation, _) in enumerate(OPERATIONS) if operation not in left_out]
        self.allowed = torch.tensor(numbers)

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Change `images`, (batch, side, side, channels) whole numbers or float32, contiguous.

        Returns uint8 or, of 16 bits, whole numbers in float32.

        `draws` is (batch, num_draws), from 0 to 1, on the CPU.
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
    """Apply to each image the operation of number `which` (batch,): all of a function at once.

    `which` and `magnitudes` are on the CPU.
    """
    device = images.device
    columns = torch.zeros(max(FUNCTIONS.values()), len(which))
    columns.scatter_(0, COLUMN[which][None], magnitudes[None])
    on_cpu = device.type == "cpu"
    size = images[0].numel()
    if on_cpu and size >= LARGE:
        alone = images.contiguous().split(1)
        each = zip(alone, which.tolist(), columns.split(1, dim=1), strict=True)
        return torch.cat([apply(FUNCTION_OF[n], image, own) for image, n, own in each])
    function = FUNCTION[which]
    order = function.argsort()
    counts = function.bincount(minlength=len(FUNCTIONS)).tolist()
    packed = torch.cat((order[None].int(), columns[:, order].view(torch.int32)))  # one to copy
    if images.is_cuda:
        packed = packed.pin_memory()
    # Elsewhere the host must wait: https://github.com/pytorch/pytorch/issues/189690
    packed = packed.to(device, non_blocking=images.is_cuda)
    rows = packed[0].long().split(counts)
    columns = packed[1:].view(torch.float32)
    # On a CPU a few images at a time, so that what an operation makes of them stays in its cache.
    together = CACHED // size if on_cpu else len(which)
    changed = torch.empty_like(images)
    words = torch.uint8 if size % 8 else torch.int64  # 8 x fewer to copy
    for operation, *group in zip(FUNCTIONS, rows, columns.split(counts, dim=1), strict=True):
        parts = (tensor.split(together, dim=-1) for tensor in group)
        for row, own in zip(*parts, strict=True) if len(group[0]) else ():
            result = apply(operation, images.index_select(0, row), own)
            changed.flatten(1).view(words).index_copy_(0, row, result.flatten(1).view(words))
    return changed


def apply(operation: Callable[..., Tensor], images: Tensor, columns: Tensor) -> Tensor:
    """`operation` of `images` with those of `columns`, (most, count), that are its magnitudes."""
    return operation(images, *columns[: FUNCTIONS[operation]])


def identity(images: Tensor, _: Tensor) -> Tensor:
    """The images as they are."""
    return images


def shift_or_shear_x(images: Tensor, slopes: Tensor, right: Tensor, down: Tensor) -> Tensor:
    """Shear and translate: move each row by its distance from the upper border times a slope.

    And all of them by whole pixels; black where there is none.
    """
    count, height, width, channels = images.shape
    y = torch.arange(height, device=images.device)
    rows = y - down.long()[:, None]
    columns = (slopes[:, None] * (y + 0.5)).round().long() - right.long()[:, None]
    # Between rows as many black pixels, so that a window on a row may begin outside of it.
    spaced = images.new_zeros((count * height + 1, 2, width, channels))
    spaced[:-1, 1] = images.flatten(0, 1)
    is_inside = (rows >= 0) & (rows < height)
    columns = torch.where(is_inside, columns, width).clamp(-width, width)
    numbers = torch.arange(count, device=images.device)[:, None] * height + rows % height
    size = (2 * width * count * height + 1, channels * width)
    windows = spaced.view(-1).as_strided(size, (channels, 1))
    starts = numbers * 2 * width + width + columns
    return windows.index_select(0, starts.flatten()).view_as(images)


def rotate_or_shear_y(images: Tensor, slopes: Tensor, degrees: Tensor) -> Tensor:
    """Shear: move each column by its distance from the left border times a slope.

    Or turn counterclockwise about the middle. The nearest pixel; black where there is none.
    """
    count, height, width, channels = images.shape
    # From the middle.
    y = torch.arange(height, device=images.device) - (height - 1) / 2
    x = torch.arange(width, device=images.device) - (width - 1) / 2
    angle = (degrees * (math.pi / 180))[:, None, None]
    slopes = slopes[:, None, None]
    y = y[:, None]
    sin, cos = angle.sin(), angle.cos()
    y, x = y * cos + (x * sin + slopes * (x + width / 2)), x * cos - y * sin
    # All that is outside is the frame.
    framed = images.new_zeros((count, height + 2, width + 2, channels))
    framed[:, 1:-1, 1:-1] = images
    y = y.add_(height / 2 - 0.5).round_().clamp_(-1, height)
    x = x.add_(width / 2 - 0.5).round_().clamp_(-1, width)
    origins = torch.arange(count, dtype=torch.int32, device=images.device) * (height + 2) + 1
    places = y.mul_(width + 2).add_(x).int() + (origins * (width + 2) + 1)[:, None, None]
    return framed.view(-1, channels).index_select(0, places.flatten()).view_as(images)


def brightness(images: Tensor, change: Tensor) -> Tensor:
    """Blend with black; `change` is -1 for black, 0 for the image itself, 1 for twice as bright."""
    rows = images.flatten(2).float().mul_(1 + change[:, None, None])
    return whole(rows, images).view_as(images)


def color(images: Tensor, change: Tensor) -> Tensor:
    """Blend with the gray image."""
    numbers = images.float()
    gray = luminance(numbers, copies=3).expand_as(numbers).flatten(2)
    return whole(blend(numbers, gray, change), images).view_as(images)


def contrast(images: Tensor, change: Tensor) -> Tensor:
    """Blend with the mean gray."""
    numbers = images.float()
    means = luminance(numbers).mean(dim=(1, 2))[:, None]
    return whole(blend(numbers, means, change), images).view_as(images)


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
    sharper = smooth.sub_(middle).mul_(-change[:, None, None]).add_(middle)
    changed.flatten(2)[:, 1:-1, step:-step] = whole(sharper, images)
    return changed


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
    first = 256 * torch.arange(tables, dtype=torch.int32, device=images.device)
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


def whole(numbers: Tensor, images: Tensor) -> Tensor:
    """Numbers cut off to the range of `images`, and of their type."""
    return to_bytes(numbers) if images.dtype == torch.uint8 else numbers.trunc().clamp_(0, 65535)


def to_bytes(numbers: Tensor) -> Tensor:
    """Numbers cut off to 0 .. 255, as uint8; by way of 16 bits, 2 x faster on a CPU."""
    return numbers.short().clamp_(0, 255).byte()


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
FUNCTIONS = Counter(FUNCTION_OF)  # the number of magnitudes of each
FUNCTION = torch.tensor([[*FUNCTIONS].index(function) for function in FUNCTION_OF])
COLUMN = torch.tensor([FUNCTION_OF[:n].count(function) for n, function in enumerate(FUNCTION_OF)])
