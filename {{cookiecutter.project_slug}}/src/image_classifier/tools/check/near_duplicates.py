"""Near-duplicates: the same picture saved again, scaled, brightened, or cropped by up to 5 %.

Two looks, and the second decides:

1. Pairs with similar 64-bit difference hashes (dHash,
   https://www.hackerfactor.com/blog/index.php?/archives/529-Kind-of-Like-That.html) that correlate
   in fine detail at 32 x 32 look alike. Gray, centered images on black do so by the hundred.
2. At 64 x 64, one image is scaled and moved onto the other (Gauss-Newton, coarse to fine), and
   their fine detail must correlate everywhere: slices of a brain share the skull, copies share all.

Mirrored, rotated and strongly cropped copies are missed.
"""

from collections.abc import Callable

import numpy as np
import torch
from scipy.sparse import coo_array, csgraph
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, grid_sample

SIDE, FINE_SIDE = 32, 64  # pixels of the gray images of the first look, and of the second
FLAT_STD = 3.0  # of 255: an image of less contrast has nothing to compare but JPEG noise
MAX_DISTANCE = 12  # bits in which the hashes of a candidate pair differ
MIN_CORRELATION, LOOK_ALIKE = 0.5, 0.65  # at the first look: to be a candidate, to be told of
MAX_SHIFT = 2  # pixels, in each direction, by which a copy may be moved at the first look
EDGE = 6  # pixels that do not belong to the center: many photographs share a white frame
NEAREST_HASHES = 32  # pairs per image at the first look: hashes of gray scans are much the same
NEAREST = 8  # candidates per image, as every two frames of a film would be a pair
BLOCK = 2**25  # hash comparisons at once: 128 MB
BLUR = 7  # pixels of the box blur: what it takes away is fine detail
LEVELS, STEPS = (16, 32, 64), 3  # sides of the images that are aligned, and steps on each
MAX_WARP = 0.2  # largest change of size, and largest shift in halves of the side
MIN_SIDE = 48  # pixels that an image should have for the second look at FINE_SIDE
MIN_WHOLE = 0.9  # correlation of fine detail after that
MIN_LOCAL = 0.65  # the same within windows, wherever there is detail
WINDOW = {SIDE: 5, FINE_SIDE: 7}  # pixels of a window's side
WORST = 0.03  # the share of the places with detail that may correlate less
NOISE = 2.0  # variance of JPEG noise in fine detail: less is no detail
MAX_ROUNDS = 4  # representatives of a chain of copies: what they leave over is too alike to judge

Compare = Callable[[Tensor], Tensor]  # pairs (count, 2) -> whether they are copies (count,) bool


def find_candidates(grays: np.ndarray, chosen: np.ndarray) -> tuple[Tensor, Tensor]:
    """Pairs that may be copies, among the images `chosen`: (pairs, 2) int64.

    And their correlation at the first look: (pairs,) float32.

    Args:
        grays: (count, SIDE, SIDE) uint8, all images.
        chosen: (num_chosen,) int64, in rising order: the images to compare.
    """
    images = torch.from_numpy(grays)
    numbers = torch.from_numpy(chosen)
    if not len(numbers):
        return torch.empty((0, 2), dtype=torch.int64), torch.empty(0)
    hashes = torch.cat([dhash(images[part].float()) for part in numbers.split(4096)])
    pairs = numbers[nearest_pairs(hashes)]
    parts = pairs.split(4096)
    scores = torch.cat([correlation(*(images[side].float() for side in p.T)) for p in parts])
    order = torch.from_numpy(np.lexsort((-scores, pairs[:, 0])))  # the best of each image first
    first = pairs[order, 0].contiguous()
    rank = torch.arange(len(order)) - torch.searchsorted(first, first)
    kept = order[(rank < NEAREST) & (scores[order] > MIN_CORRELATION)]
    return pairs[kept], scores[kept]


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
    rows = max(1, BLOCK // max(1, len(hashes)))
    for first in range(0, len(hashes), rows):
        agreement = (hashes[first : first + rows] @ hashes[first:].T).triu_(1)  # 64 - 2 x distance
        some = (agreement.amax(1) >= least).nonzero()[:, 0]  # a top-k of all rows takes longer
        values, columns = agreement[some].topk(min(NEAREST_HASHES, agreement.shape[1]))
        both = torch.stack((some[:, None].expand_as(columns), columns), dim=2)
        pairs.append(first + both[values >= least])
    return torch.cat(pairs)


def fine_detail(grays: Tensor) -> Tensor:
    """Images less their box blur."""
    return grays - box_blur(grays, BLUR)


def box_blur(images: Tensor, width: int) -> Tensor:
    """The mean of `width` x `width` pixels around each; `width` is odd."""
    line = torch.arange(images.shape[-1])
    near = ((line - line[:, None]).abs() <= width // 2).float()
    near /= near.sum(1, keepdim=True)
    return near @ images @ near.T  # faster than avg_pool2d


def correlation(first: Tensor, second: Tensor) -> Tensor:
    """Correlation of fine detail in pairs of gray images, at the best of some shifts: (pairs,).

    It is that of the whole images or of their centers, whichever is less.
    """
    center = torch.zeros(SIDE, SIDE)
    center[EDGE:-EDGE, EDGE:-EDGE] = 1
    fine = fine_detail(torch.stack((first, second)))
    scores = []
    for detail in (fine, fine * center):
        length = detail.norm(dim=(2, 3), keepdim=True).clamp(min=1e-3)
        one, other = torch.fft.rfft2(detail / length)
        shifted = torch.fft.irfft2(one * other.conj()).roll((MAX_SHIFT, MAX_SHIFT), (1, 2))
        scores.append(shifted[:, : 2 * MAX_SHIFT + 1, : 2 * MAX_SHIFT + 1].flatten(1))
    return torch.minimum(*scores).amax(1)


def are_copies(grays: Tensor, sides: Tensor, pairs: Tensor) -> Tensor:
    """Whether pairs, (count, 2) int64, of gray images are the same picture: (count,) bool.

    `grays` are (images, FINE_SIDE, FINE_SIDE) uint8, and `sides`, (images,), the shorter sides of
    the images: where one has fewer pixels, a pair is compared at SIDE x SIDE.
    """
    answers = torch.zeros(len(pairs), dtype=torch.bool)
    is_small = (sides < MIN_SIDE)[pairs].any(1)
    for side, chosen in ((SIDE, is_small), (FINE_SIDE, ~is_small)):
        for part in chosen.nonzero()[:, 0].split(256):
            both = (adaptive_avg_pool2d(grays[n].float(), side) for n in pairs[part].T)
            whole, local = aligned_correlation(*both)
            answers[part] = (whole > MIN_WHOLE) & (local > MIN_LOCAL)
    return answers


def aligned_correlation(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Correlation of fine detail once `second` is moved onto `first`: twice (pairs,).

    Of the whole images, and of the windows that correlate least (of those with detail, but for the
    share WORST), by the contrast and structure terms of SSIM
    (https://doi.org/10.1109/TIP.2003.819861).
    """
    warp = torch.zeros(len(first), 4)
    for side in (level for level in LEVELS if level <= first.shape[1]):
        small = (adaptive_avg_pool2d(images, side) for images in (first, second))
        warp = align(*(box_blur(fine_detail(images), 3) for images in small), warp)
    moved, is_inside = warped(fine_detail(second), warp)
    still = fine_detail(first) * is_inside
    energy = still.square().sum((1, 2))
    energy_of_other = moved.square().sum((1, 2)).clamp(min=1e-3)
    whole = (still * moved).sum((1, 2)) / (energy * energy_of_other).sqrt().clamp(min=1e-3)
    moved = moved * (energy / energy_of_other).sqrt()[:, None, None]  # to the same contrast
    window = WINDOW[first.shape[1]]
    square, other, product = (
        box_blur(part, window) for part in (still.square(), moved.square(), still * moved)
    )
    local = (product + NOISE) / ((square + other) / 2 + NOISE)
    has_detail = torch.maximum(square, other) * is_inside > NOISE
    ranked = local.masked_fill(~has_detail, torch.inf).flatten(1).sort(1).values
    place = (WORST * has_detail.sum((1, 2))).long()
    return whole, ranked.gather(1, place[:, None])[:, 0]


def align(first: Tensor, second: Tensor, warp: Tensor) -> Tensor:
    """Improve `warp`, (pairs, 4), under which `second` resembles `first`: of the same shape.

    Gauss-Newton with the slopes of `first`, which stay the same: the inverse compositional method
    without the composition (https://doi.org/10.1023/B:VISI.0000011205.11775.fd).
    """
    side = first.shape[1]
    line = places(side)
    down, right = torch.gradient(first, dim=(1, 2))
    slopes = torch.stack((right * line, down * line[:, None], right, down), dim=3)
    slopes = slopes.flatten(1, 2) * (side / 2)  # (pairs, pixels, 4)
    normal = slopes.mT @ slopes
    damping = normal.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * 1e-3 + 1e-3
    solver = torch.linalg.inv(normal + damping * torch.eye(4)) @ slopes.mT
    best = warp
    highest = torch.full((len(first),), -1.0)
    for step in range(STEPS + 1):
        moved, is_inside = warped(second, warp)
        still = first * is_inside
        product = (still * moved).sum((1, 2))
        energy = moved.square().sum((1, 2)).clamp(min=1e-3)
        score = product / (energy * still.square().sum((1, 2))).sqrt().clamp(min=1e-3)
        is_better = score > highest
        best = torch.where(is_better[:, None], warp, best)
        highest = torch.maximum(score, highest)
        if step < STEPS:
            rest = still - moved * (product / energy)[:, None, None]
            change = (solver @ rest.flatten(1)[:, :, None])[:, :, 0]
            warp = (warp + change).clamp(-MAX_WARP, MAX_WARP)
    return best


def places(side: int) -> Tensor:
    """The centers of the pixels, from -1 to 1: (side,)."""
    return (torch.arange(side) + 0.5) * 2 / side - 1


def warped(images: Tensor, warp: Tensor) -> tuple[Tensor, Tensor]:
    """Images scaled and moved: (count, side, side); 0 outside, and where that is not: bool.

    `warp` has by how much x and y grow, and by how much they are moved: (count, 4).
    """
    count, side, _ = images.shape
    line = places(side)
    x, y = (line * (1 + warp[:, n, None]) + warp[:, n + 2, None] for n in (0, 1))
    grid = torch.stack(
        (x[:, None].expand(count, side, side), y[:, :, None].expand(count, side, side)), 3
    )
    is_inside = (x.abs() <= 1)[:, None] & (y.abs() <= 1)[:, :, None]
    return grid_sample(images[:, None], grid, align_corners=False)[:, 0] * is_inside, is_inside


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
