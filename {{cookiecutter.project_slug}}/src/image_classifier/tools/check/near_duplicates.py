"""Near-duplicates: the same picture saved again, scaled, brightened, or cropped by 2 %.

Pairs of images with similar 64-bit difference hashes (dHash,
https://www.hackerfactor.com/blog/index.php?/archives/529-Kind-of-Like-That.html) are candidates;
they must also correlate in fine detail. Mirrored, rotated and strongly cropped copies are missed.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, avg_pool2d

SIDE = 32  # pixels of the gray images
FLAT_STD = 3.0  # of 255: an image of less contrast has nothing to compare but JPEG noise
MAX_DISTANCE = 10  # bits in which the hashes of a candidate pair differ
MIN_CORRELATION = 0.65  # from 0.6 on, no pair in CIFAR-10's 60,000 images has two classes
MAX_SHIFT = 2  # pixels, in each direction, by which a copy may be moved
EDGE = 6  # pixels that do not belong to the center: many photographs share a white frame
NEAREST = 8  # candidates per image, as every two frames of a film would be a pair
BLOCK = 2**25  # hash comparisons at once: 128 MB


def find_near_duplicates(grays: np.ndarray, chosen: np.ndarray) -> Tensor:
    """Pairs of near-duplicates among the images `chosen`: (pairs, 2) int64.

    Args:
        grays: (count, SIDE, SIDE) uint8, all images.
        chosen: (num_chosen,) int64, in rising order: the images to compare.
    """
    images, numbers = torch.from_numpy(grays), torch.from_numpy(chosen)
    if not len(numbers):
        return torch.empty((0, 2), dtype=torch.int64)
    hashes = torch.cat([dhash(images[part].float()) for part in numbers.split(4096)])
    pairs = numbers[nearest_pairs(hashes)]
    if not len(pairs):
        return pairs
    agree = [
        correlation(*(images[side].float() for side in part.T)) > MIN_CORRELATION
        for part in pairs.split(4096)
    ]
    return pairs[torch.cat(agree)]


def dhash(grays: Tensor) -> Tensor:
    """Whether brightness rises from cell to cell of a 9 x 8 grid: (count, 64) of 1 and -1, float32.

    Flat images get zeros, which agree with nothing.
    """
    cells = adaptive_avg_pool2d(grays, (8, 9))
    bits = (cells[:, :, 1:] > cells[:, :, :-1]).flatten(1) * 2.0 - 1
    return bits * (grays.std((1, 2)) >= FLAT_STD)[:, None]


def nearest_pairs(hashes: Tensor) -> Tensor:
    """Pairs of rows within MAX_DISTANCE, up to NEAREST for each: (pairs, 2) int64."""
    pairs = [torch.empty((0, 2), dtype=torch.int64)]
    least = 64 - 2 * MAX_DISTANCE
    rows = max(1, BLOCK // max(1, len(hashes)))
    for first in range(0, len(hashes), rows):
        agreement = (hashes[first : first + rows] @ hashes[first:].T).triu_(1)  # 64 - 2 x distance
        some = (agreement.amax(1) >= least).nonzero()[:, 0]  # a top-k of all rows takes longer
        values, columns = agreement[some].topk(min(NEAREST, agreement.shape[1]))
        both = torch.stack((some[:, None].expand_as(columns), columns), dim=2)
        pairs.append(first + both[values >= least])
    return torch.cat(pairs)


def correlation(first: Tensor, second: Tensor) -> Tensor:
    """Correlation of fine detail in pairs of gray images, at the best of some shifts: (pairs,).

    It is that of the whole images or of their centers, whichever is less.
    """
    center = torch.zeros(SIDE, SIDE)
    center[EDGE:-EDGE, EDGE:-EDGE] = 1
    fine = torch.stack((first, second))
    fine = fine - avg_pool2d(fine, 7, stride=1, padding=3, count_include_pad=False)
    scores = []
    for detail in (fine, fine * center):
        length = detail.norm(dim=(2, 3), keepdim=True).clamp(min=1e-3)
        one, other = torch.fft.rfft2(detail / length)
        shifted = torch.fft.irfft2(one * other.conj()).roll((MAX_SHIFT, MAX_SHIFT), (1, 2))
        scores.append(shifted[:, : 2 * MAX_SHIFT + 1, : 2 * MAX_SHIFT + 1].flatten(1))
    return torch.minimum(*scores).amax(1)


def connected_components(pairs: Tensor, count: int) -> Tensor:
    """The lowest number in the group of each of `count` images: (count,) int64."""
    lowest = torch.arange(count)
    while True:
        first, second = lowest[pairs.T]
        least = torch.minimum(first, second)
        joined = lowest.scatter_reduce(0, torch.cat((first, second)), least.repeat(2), "amin")
        joined = joined[joined]
        if torch.equal(joined, lowest):
            return lowest
        lowest = joined
