"""Progressive resolution: training begins on small images, and ends on those of full size.

Most of what is learned is learned as well from small images, which take a part of the time:
https://arxiv.org/abs/2104.00298, https://github.com/libffcv/ffcv-imagenet
"""

from collections.abc import Callable
from math import floor

from torch import Tensor
from torch.nn.functional import interpolate

from .config import AugmentConfig

LARGE_IMAGE = 128  # pixels, from which on sides are multiples of 32, which most networks halve to 1
MULTIPLES = 4, 32  # below and from there: few sizes, as each is compiled and tuned for anew


def build_size(
    augment: AugmentConfig, image_size: int, steps_per_epoch: int, total_steps: int
) -> Callable[[int], int]:
    """The side of training images in pixels as a function of the step; it changes between epochs.

    From `min_size` it grows linearly to `image_size`, in steps of a multiple.
    """
    least, begin, end = augment.min_size, augment.growth_begin, augment.growth_end
    multiple = MULTIPLES[image_size >= LARGE_IMAGE]

    def size_at(step: int) -> int:
        done = step // steps_per_epoch * steps_per_epoch / total_steps
        if not least or done >= end:
            return image_size
        if done <= begin:
            return least
        side = least + (image_size - least) * (done - begin) / (end - begin)
        return min(image_size, max(least, multiple * floor(side / multiple + 0.5)))

    return size_at


def shrink(pixels: Tensor, size: int) -> Tensor:
    """Images scaled to `size`, bilinear and antialiased: (batch, height, width, 3), in and out."""
    if pixels.shape[1] == size:
        return pixels
    images = pixels.permute(0, 3, 1, 2)
    if images.device.type != "cpu":
        images = images.float()  # there is no kernel for bytes
    return interpolate(images, (size, size), mode="bilinear", antialias=True).permute(0, 2, 3, 1)
