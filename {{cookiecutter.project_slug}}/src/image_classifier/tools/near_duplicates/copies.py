"""Near-duplicates: the same picture saved again, scaled, brightened, or cropped by up to 5 %.

Two looks, and the second decides:

1. Pairs with similar 64-bit difference hashes (dHash,
   https://www.hackerfactor.com/blog/index.php?/archives/529-Kind-of-Like-That.html) that correlate
   in fine detail at 32 x 32 look alike. Gray, centered images on black do so by the hundred.
2. At 64 x 64, one image is aligned with the other, and their fine detail must correlate
   everywhere (`alignment.py`): slices of a brain share the skull, copies share all.

Mirrored, rotated and strongly cropped copies are missed.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from scipy.sparse import coo_array, csgraph
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, interpolate

from ...runtime.console import Progress
from .alignment import aligned_correlation, fine_detail

COARSE = 32  # pixels of a side at the first look
FLAT_STD = 3.0  # of 255: an image of less contrast has nothing to compare but JPEG noise
MAX_DISTANCE = 12  # bits in which the hashes of a candidate pair differ
MIN_CORRELATION, LOOK_ALIKE = 0.5, 0.65  # at the first look: to be a candidate, to be told of
MAX_SHIFT = 2  # pixels, in each direction, by which a copy may be moved at the first look
EDGE = 6  # pixels that do not belong to the center: many photographs share a white frame
NEAREST_HASHES = 32  # pairs per image at the first look: hashes of gray scans are much the same
NEAREST = 8  # candidates per image, as every two frames of a film would be a pair
BLOCK = 2**25  # hash comparisons at once: 128 MB
MIN_SIDE = 48  # pixels that both images should have for the second look at full size
MIN_WHOLE = 0.9  # correlation of fine detail at the second look
MIN_LOCAL = 0.65  # the same within windows, wherever there is detail
MAX_ROUNDS = 4  # representatives of a chain of copies: what they leave over is too alike to judge
MAX_COPIES = 10  # different files that may be one picture: a larger group is too alike to judge

Compare = Callable[[Tensor], Tensor]  # pairs (count, 2) -> whether they are copies (count,) bool


def group_images(
    grays: np.ndarray, sides: np.ndarray, chosen: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Compare images, and group those that are copies, and those that look alike, copies or not.

    Args:
        grays: (count, 64, 64) uint8, all images.
        sides: (count,) int, pixels of the shorter side of each image file.
        chosen: (num_chosen,) int64, in rising order: the images to compare.

    Returns:
        The lowest number of the group that each image is in, its own if it is in none, twice:
        (count,) int64.
    """
    images = torch.from_numpy(grays)
    compare = partial(are_copies, images, torch.from_numpy(sides))
    pairs, scores = find_candidates(images, torch.from_numpy(chosen))
    are_same = compare(pairs)
    group = group_copies(pairs[are_same], len(grays), compare)
    is_large = group.bincount(minlength=len(grays)) > MAX_COPIES
    group = torch.where(is_large[group], torch.arange(len(grays)), group)
    alike = connected_components(pairs[are_same | (scores > LOOK_ALIKE)], len(grays))
    return group.numpy(), alike.numpy()


def find_candidates(images: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs of `chosen` images that may be copies: (pairs, 2) int64.

    And their correlation at the first look: (pairs,) float32.
    """
    if not len(chosen):
        return torch.empty((0, 2), dtype=torch.int64), torch.empty(0)
    hashes = torch.cat([dhash(scaled(images[part], COARSE)) for part in chosen.split(4096)])
    pairs = chosen[nearest_pairs(hashes)]
    if not len(pairs):  # the FFT of torch 2.11 does not take none
        return pairs, torch.empty(0)
    parts = pairs.split(4096)
    scores = torch.cat([correlation(*(scaled(images[n], COARSE) for n in p.T)) for p in parts])
    order = torch.from_numpy(np.lexsort((-scores, pairs[:, 0])))  # the best of each image first
    first = pairs[order, 0].contiguous()
    rank = torch.arange(len(order)) - torch.searchsorted(first, first)
    kept = order[(rank < NEAREST) & (scores[order] > MIN_CORRELATION)]
    return pairs[kept], scores[kept]


def scaled(images: Tensor, side: int) -> Tensor:
    """Images, (count, 64, 64), at a smaller size: (count, side, side) float32."""
    return interpolate(images[:, None].float(), side, mode="bilinear", antialias=True)[:, 0]


def dhash(grays: Tensor) -> Tensor:
    """Whether brightness rises from cell to cell of a 9 x 8 grid: (count, 64) of 1 and -1, float32.

    Flat images get zeros, which agree with nothing.
    """
    cells = adaptive_avg_pool2d(grays, (8, 9))
    bits = (cells[:, :, 1:] > cells[:, :, :-1]).flatten(1) * 2.0 - 1
    return bits * (grays.std((1, 2)) >= FLAT_STD)[:, None]


def nearest_pairs(hashes: Tensor) -> Tensor:
    """Pairs of rows within MAX_DISTANCE, up to NEAREST_HASHES for each: (pairs, 2) int64."""
    pairs = [torch.empty((0, 2), dtype=torch.int64)]
    least = 64 - 2 * MAX_DISTANCE
    rows = max(1, BLOCK // len(hashes))
    for first in range(0, len(hashes), rows):
        agreement = (hashes[first : first + rows] @ hashes[first:].T).triu_(1)  # 64 - 2 x distance
        some = (agreement.amax(1) >= least).nonzero()[:, 0]  # a top-k of all rows takes longer
        values, columns = agreement[some].topk(min(NEAREST_HASHES, agreement.shape[1]))
        both = torch.stack((some[:, None].expand_as(columns), columns), dim=2)
        pairs.append(first + both[values >= least])
    return torch.cat(pairs)


def correlation(first: Tensor, second: Tensor) -> Tensor:
    """Correlation of fine detail in pairs of gray images, at the best of some shifts: (pairs,).

    It is that of the whole images or of their centers, whichever is less.
    """
    center = torch.zeros(COARSE, COARSE)
    center[EDGE:-EDGE, EDGE:-EDGE] = 1
    fine = fine_detail(torch.stack((first, second)))
    scores = []
    for detail in (fine, fine * center):
        length = detail.norm(dim=(2, 3), keepdim=True).clamp(min=1e-3)
        one, other = torch.fft.rfft2(detail / length)
        shifted = torch.fft.irfft2(one * other.conj()).roll((MAX_SHIFT, MAX_SHIFT), (1, 2))
        scores.append(shifted[:, : 2 * MAX_SHIFT + 1, : 2 * MAX_SHIFT + 1].flatten(1))
    return torch.minimum(*scores).amax(1)


def are_copies(images: Tensor, sides: Tensor, pairs: Tensor) -> Tensor:
    """Whether pairs, (count, 2) int64, of gray images are the same picture: (count,) bool.

    Where the shorter side of one has fewer than MIN_SIDE pixels, a pair is compared at 32 x 32.
    """
    answers = torch.zeros(len(pairs), dtype=torch.bool)
    done = 0
    progress = Progress(len(pairs), what="pairs")
    is_small = (sides < MIN_SIDE)[pairs].any(1)
    for side, chosen in ((COARSE, is_small), (images.shape[1], ~is_small)):
        for part in chosen.nonzero()[:, 0].split(256) if chosen.any() else ():
            whole, local = aligned_correlation(*(scaled(images[n], side) for n in pairs[part].T))
            answers[part] = (whole > MIN_WHOLE) & (local > MIN_LOCAL)
            done += len(part)
            progress.show(done)
    return answers


def group_copies(pairs: Tensor, count: int, compare: Compare) -> Tensor:
    """The lowest number of which each of `count` images is a copy, or its own: (count,) int64.

    `pairs` of copies form chains, such as the frames of a film. So each image is compared with the
    first of its chain; those that differ from it form groups of their own.
    """
    group = torch.arange(count)
    for _ in range(MAX_ROUNDS):
        lowest = connected_components(pairs, count)
        members = pairs.unique()
        first = lowest[members]
        fits = (first == members) | compare(torch.stack((first, members), dim=1))
        group[members[fits]] = first[fits]
        pairs = pairs[torch.isin(pairs, members[~fits]).all(1)]
    return group


def connected_components(pairs: Tensor, count: int) -> Tensor:
    """The lowest number in the group of each of `count` images: (count,) int64."""
    edges = coo_array((np.ones(len(pairs)), pairs.numpy().T), (count, count))
    _, component = csgraph.connected_components(edges, directed=False)
    _, lowest = np.unique(component, return_index=True)
    return torch.from_numpy(lowest[component])
