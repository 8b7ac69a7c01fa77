"""Symmetries, colors and blur of whole batches, on the device; and your own, image by image.

In this order: flip and turn, jitter, grayscale, blur, then those of `mine.py`. Each image has the
same number of draws whatever is on, so an option changes nothing of what the others draw. Colors
and blur are torchvision's: whole numbers after each operation.
"""

from collections.abc import Sequence
from itertools import permutations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...config import AugmentConfig
from ...data import take
from ...errors import UserError
from ...runtime import seeding
from . import mine

# The draws of an image: places in a row of them, all from 0 to 1.
FLIP, TURN, ORDER, FACTORS, GRAY, BLUR, SIGMA, SEED = 0, 1, 2, slice(3, 6), 6, 7, 8, slice(9, 11)
NUM_DRAWS = 11
DRAWN_BITS = 24  # of a draw
LUMINANCE = 0.2989, 0.587, 0.114  # of red, green and blue, by ITU-R BT.601
CONTRAST, SATURATION, BRIGHTNESS = range(3)
UNCHANGED = torch.tensor([1.0, 0.0, 0.0])[:, None]  # an image, less its gray image and its mean
ORDERS = torch.tensor([*permutations(range(3))])  # (6, 3): in which an image gets the three
SIGMAS = 0.1, 2.0  # in pixels
REACH = 20  # a kernel of blur reaches so many times less far than an image is wide
ALONE = 96  # pixels of a side from which a CPU moves images one by one
CACHED = 2**18  # float32 numbers of images that a CPU works on at once


def open_policy(augment: AugmentConfig, channels: int, bits: int) -> "Transforms | None":  # noqa: ARG001
    """What the options of this tool and `mine.py` do to images of so many bits; None if nothing.

    Raises:
        UserError: if `mine.py` has transforms, which are of 8 bits, and images have 16.
    """
    if mine.TRANSFORMS and bits != 8:
        raise UserError(
            f"tools/transforms/mine.py has transforms, which are of 8 bits; --data.bits is {bits}"
        )
    found = Transforms(augment, bits)
    return found if found.moves or found.recolors or mine.TRANSFORMS else None


class Transforms:
    """Random changes of each image, drawn by the host, which waits for the device only by `mine`.

    A flip upside down, a turn by a multiple of 90 degrees, brightness, contrast and saturation in
    random order, grayscale, and a Gaussian blur.
    """

    key = 5  # of its draws: a stream that no other has
    num_draws = NUM_DRAWS  # for each image

    def __init__(self, augment: AugmentConfig, bits: int = 8) -> None:
        """What `augment` says, for images of so many bits."""
        self.augment = augment
        self.bits = bits
        self.moves = augment.vertical_flip or augment.turns
        self.recolors = augment.jitter > 0 or augment.grayscale > 0 or augment.blur > 0

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Change `images`, (batch, side, side, channels) whole numbers or float32, contiguous.

        Returns images of the same type if they are only moved; else uint8 or, of 16 bits, whole
        numbers in float32.

        `draws` is (batch, NUM_DRAWS), from 0 to 1, on the CPU.
        """
        if self.moves:
            images = self.moved(images, draws)
        if self.recolors:
            images = self.recolored(images, draws)
        return apply_own(images, draws) if mine.TRANSFORMS else images

    def recolored(self, images: Tensor, draws: Tensor) -> Tensor:
        """The images in other colors, and blurred; each that is neither is as it was."""
        rounds = self.color_rounds(draws)
        is_blurred = draws[:, BLUR] < self.augment.blur
        is_changed = is_blurred | (rounds != UNCHANGED).any(0).any(0)
        if images.dtype != torch.uint8:  # all get another type
            is_changed.fill_(True)
        rows = torch.arange(len(images))[is_changed]
        if not len(rows):
            return images
        parts = [rows]
        if images.device.type == "cpu":  # a few at a time, so that they stay in its cache
            parts = rows.split(max(1, CACHED // images[0].numel()))
        changed = []
        for part in parts:
            is_whole = len(part) == len(images)
            some = images if is_whole else take(images, to_device(part, images.device))
            blurred = torch.arange(len(part))[is_blurred[part]]
            some = self.repainted(some, rounds.index_select(2, part), blurred, draws[part, SIGMA])
            changed.append(some)
        if len(rows) == len(images):
            return torch.cat(changed) if len(changed) > 1 else changed[0]
        return images.index_copy(0, to_device(rows, images.device), torch.cat(changed))

    def repainted(self, images: Tensor, rounds: Tensor, blurred: Tensor, sigmas: Tensor) -> Tensor:
        """The images, all at once, by `rounds` of `color_rounds`; those numbered `blurred` blurred.

        `sigmas` are draws, (batch,).
        """
        device = images.device
        # Plane by plane, which is faster than whole images in another order.
        planes = torch.stack([plane.float() for plane in images.unbind(3)], 1)
        if images.is_floating_point():
            planes.round_()
        needed = rounds[:, 1:].any(2).tolist()  # of the gray image: itself, and its mean
        for shares, of_gray in zip(to_device(rounds, device), needed, strict=True):
            planes = blended(planes, shares[..., None, None, None], of_gray, 2**self.bits - 1)
        if len(blurred):
            kernels = gaussians(sigmas[blurred], planes.shape[3])
            rows = to_device(blurred, device)
            some = blur(planes.index_select(0, rows), to_device(kernels, device))
            planes.index_copy_(0, rows, some)
        kind = torch.uint8 if self.bits == 8 else torch.float32
        return torch.stack(planes.to(kind).unbind(1), 3)

    def moved(self, images: Tensor, draws: Tensor) -> Tensor:
        """The images flipped upside down, then turned counterclockwise."""
        flips = (draws[:, FLIP] < 0.5) & self.augment.vertical_flip
        if not self.augment.turns:
            return flipped(images, to_device(flips, images.device))
        turns = (draws[:, TURN] * 4).long()
        is_transposed = turns % 2 == 1
        is_up = (turns >= 2) ^ flips
        is_left = (turns == 1) | (turns == 2)
        flags = torch.stack((is_transposed, is_up, is_left))
        if images.device.type == "cpu" and images.shape[1] >= ALONE:
            return symmetric_alone(images, flags)
        return symmetric(images, *to_device(flags, images.device))

    def color_rounds(self, draws: Tensor) -> Tensor:
        """What `blended` needs for each operation on the colors: (rounds, 3, batch) float32."""
        rounds = []
        if self.augment.jitter:
            factors = 1 + self.augment.jitter * (2 * draws[:, FACTORS] - 1)
            kinds = ORDERS[(draws[:, ORDER] * len(ORDERS)).long()]
            factors = factors.gather(1, kinds)
            of_gray = (1 - factors) * (kinds == SATURATION)
            of_mean = (1 - factors) * (kinds == CONTRAST)
            rounds += torch.stack((factors, of_gray, of_mean)).unbind(2)
        is_gray = (draws[:, GRAY] < self.augment.grayscale).float()
        if is_gray.any():
            rounds.append(torch.stack((1 - is_gray, is_gray, torch.zeros_like(is_gray))))
        return torch.stack(rounds) if rounds else torch.empty(0, 3, len(draws))


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Values of the host, on the device, which it need not wait for."""
    if device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    # Elsewhere the host must wait: https://github.com/pytorch/pytorch/issues/189690
    return values.to(device)


def flipped(images: Tensor, is_up: Tensor) -> Tensor:
    """The images (batch, side, side, channels), those where `is_up` (batch,) upside down."""
    count, side = images.shape[:2]
    rows = distances(side, is_up)
    first = torch.arange(0, count * side, side, device=images.device)
    return take(images.flatten(0, 1), (first[:, None] + rows).flatten()).view_as(images)


def symmetric(images: Tensor, is_transposed: Tensor, is_up: Tensor, is_left: Tensor) -> Tensor:
    """A symmetry of the square of each image (batch, side, side, channels): exact permutations.

    The pixel in row i and column j is that of row i and column j of the image, or where it
    `is_transposed` of row j and column i, counted from below where `is_up`, from the right where
    `is_left`: (batch,) bool each.
    """
    count, side = images.shape[:2]
    area = side * side
    down = distances(side, is_up) * side
    right = distances(side, is_left)
    of_row = torch.where(is_transposed[:, None], right, down)
    of_column = torch.where(is_transposed[:, None], down, right)
    first = torch.arange(0, count * area, area, device=images.device)
    kind = torch.int32 if count * area < 2**31 else torch.int64  # half as much to write and to read
    of_row = (first[:, None] + of_row).to(kind)
    places = of_row[:, :, None] + of_column.to(kind)[:, None]
    return take(images.flatten(0, 2), places.flatten()).view_as(images)


def symmetric_alone(images: Tensor, flags: Tensor) -> Tensor:
    """`symmetric` on a CPU, image by image, with flags (3, batch).

    At 224 pixels it takes a fifth to a third of a gather's time, at 64 as much.
    """
    changed = torch.empty_like(images, memory_format=torch.contiguous_format)
    # torch 2.11 flips no uint16.
    kind = torch.int16 if images.dtype is torch.uint16 else images.dtype
    pairs = zip(images.view(kind), changed.view(kind), flags.T.tolist(), strict=True)
    for image, found, own in pairs:
        is_transposed, *is_reversed = own
        turned = image.flip([dim for dim in (0, 1) if is_reversed[dim]])
        if is_transposed:  # planes by NumPy take half the time of pixels by torch
            for channel in range(image.shape[2]):
                found.numpy()[..., channel] = turned.numpy()[..., channel].T
        else:
            found.copy_(turned)
    return changed


def distances(side: int, is_reversed: Tensor) -> Tensor:
    """0 to side - 1, or down to 0 where it `is_reversed`, (batch,) bool: (batch, side) int64."""
    numbers = torch.arange(side, device=is_reversed.device)
    return (numbers - (side - 1) * is_reversed[:, None]).abs()


def blended(planes: Tensor, shares: Tensor, of_gray: Sequence[bool], largest: int) -> Tensor:
    """A blend of each image with its gray image, with the mean of that, or with black.

    Args:
        planes: (batch, 3, side, side) whole numbers in float32, which it overwrites.
        shares: of the image, of the gray image and of its mean, (3, batch, 1, 1, 1).
        of_gray: whether any image needs the gray image, and whether its mean.
        largest: number of a pixel.
    """
    factor, gray, mean = shares
    needs_gray, needs_mean = of_gray
    if not (needs_gray or needs_mean):
        return planes.mul_(factor).clamp_(0, largest).floor_()
    red, green, blue = planes.unbind(1)
    luminance = (LUMINANCE[0] * red).add_(green, alpha=LUMINANCE[1]).add_(blue, alpha=LUMINANCE[2])
    luminance = luminance.floor_()[:, None]
    others = 0
    if needs_mean:  # a sum of whole numbers is the same in any order
        total = luminance.sum((1, 2, 3), keepdim=True, dtype=torch.int64)
        others = total.float() / luminance[0].numel() * mean
    if needs_gray:
        others = luminance * gray + others
    return planes.mul_(factor).add_(others).clamp_(0, largest).floor_()


def gaussians(draws: Tensor, side: int) -> Tensor:
    """Half a kernel of blur for each of `draws`, from its middle on, and a 0: (count, reach + 2).

    `draws` are (count,) from 0 to 1.
    """
    least, most = SIGMAS
    sigmas = least + (most - least) * draws[:, None]
    reach = max(1, side // REACH)
    offsets = torch.arange(-reach, reach + 1)
    kernels = (-offsets.square() / (2 * sigmas.square())).softmax(1)
    return pad(kernels[:, reach:], (0, 1))


def blur(planes: Tensor, kernels: Tensor) -> Tensor:
    """Each image, (count, channels, side, side) float32, by a kernel of its own: whole numbers.

    `kernels` is (count, reach + 2), of `gaussians`; images are reflected at their borders.
    """
    side = planes.shape[3]
    most = kernels.shape[1] - 1
    here = torch.arange(side, device=planes.device)
    there = here[:, None]
    # How far a pixel is, and its mirror images at the borders, which are none of themselves.
    before = (here + there).masked_fill_(here == 0, most)
    after = (2 * (side - 1) - here - there).masked_fill_(here == side - 1, most)
    apart = torch.stack(((here - there).abs(), before, after)).clamp_(max=most)
    matrices = kernels.index_select(1, apart.flatten()).view(-1, *apart.shape).sum(1)[:, None]
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # without TF32, which has 11 bits
    try:
        return (matrices @ planes @ matrices.mT).round_()
    finally:
        torch.set_float32_matmul_precision(precision)


def apply_own(images: Tensor, draws: Tensor) -> Tensor:
    """Apply `mine.TRANSFORMS` to each image, on the CPU, and return them on their device, uint8.

    Raises:
        UserError: if a transform returns something else than such an image.
    """
    if images.is_floating_point():
        images = images.round().clamp(0, 255)
    changed = images.to("cpu", torch.uint8, copy=True)
    seeds = (draws[:, SEED] * 2**DRAWN_BITS).long().tolist()
    for image, seed in zip(changed, seeds, strict=True):
        with seeding.seeded(seeding.BATCH, *seed):
            found = image
            for transform in mine.TRANSFORMS:
                found = checked(transform, transform(found), image)
        image.copy_(found.clone())  # which may be a view of it
    return to_device(changed, images.device)


def checked(transform: object, found: object, image: Tensor) -> Tensor:
    """What `transform` returned, if it is like `image`.

    Raises:
        UserError: if it is not.
    """
    if isinstance(found, Tensor) and (found.shape, found.dtype) == (image.shape, torch.uint8):
        return found
    name = getattr(transform, "__name__", type(transform).__name__)
    kind = type(found).__name__
    if isinstance(found, Tensor):
        kind = f"{str(found.dtype).removeprefix('torch.')} {tuple(found.shape)}"
    raise UserError(
        f"tools/transforms/mine.py: {name} must return a uint8 tensor {tuple(image.shape)}, as it "
        f"was given, not {kind}"
    )
