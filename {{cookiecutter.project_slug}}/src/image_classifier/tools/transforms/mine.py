"""Your own transforms of training images, one image at a time; the README has examples.

Each is a function of an image, a (height, width, channels) uint8 tensor on the CPU, that returns
another of the same shape. What it draws from the global generators of torch, NumPy and `random`
depends on the seed, the step and the place of the image in the batch alone.
"""

from collections.abc import Callable

from torch import Tensor

TRANSFORMS: tuple[Callable[[Tensor], Tensor], ...] = ()
