"""Which images show the same picture: copied, saved anew, scaled, or cropped a little.

Of the small grey picture of each image the coarse features are compared with those of every other,
by matrix products. The few pairs that agree are looked at closely: one is laid on the other as well
as it goes, and then they must agree in detail, in the middle too. So flat skies, white frames and
portraits of the same kind are no twins. Mirrored and turned copies are not looked for.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

SIDE = 32  # of the small pictures, in pixels
FLAT = 3.0  # of 255: a picture of less contrast has no features, but the noise of its JPEG
FEATURES = 63  # the lowest frequencies of a picture, without its mean
ALIKE = (
    0.8  # least correlation of the features of twins; two pictures in 100,000 of CIFAR-10 have it
)
TWINS = 0.9  # least correlation in detail; CIFAR-10 has few pairs from 0.84 to 0.88, on no side
HOPELESS = 0.45  # where even coarsely laid pictures agree less in detail, a closer look is no use
NEAREST = 8  # pictures that each is looked at closely with, or a film would have every pair of them
ROWS, COLUMNS = 512, 2048  # of a matrix of correlations, so that it stays in the cache
PAIRS_TOGETHER = 128  # laid on each other at once, for the same reason
EDGE = 6  # pixels that are not the middle of a picture
MOST_MOVED, MOST_SCALED = 5.0, 1.33  # how far a picture is laid off another: crops of a quarter

Run = Callable[[Callable[[int], None], int, str], None]


def find_twins(pictures: np.ndarray, chosen: np.ndarray, run: Run) -> Tensor:
    """Pairs of those that are `chosen` and the same: (pairs, 2) int64, numbers of pictures.

    `pictures` is (count, SIDE, SIDE) uint8, grey. `run(work, count, name)` does `work(number)` for
    each number below `count`, in threads. It needs 130 to 250 bytes for each beside `pictures`.
    """
    features = features_of(pictures, chosen)
    found: dict[int, Tensor] = {}

    def search(number: int) -> None:
        found[number] = alike_from(features, number * ROWS)

    run(search, math.ceil(len(chosen) / ROWS), "compared")
    pairs = torch.from_numpy(chosen)[torch.cat([found[number] for number in sorted(found)])]
    if not len(pairs):
        return pairs
    parts = pairs.split(PAIRS_TOGETHER)
    scores = [torch.empty(0)] * len(parts)

    def look(number: int) -> None:
        first, second = (as_floats(pictures[side.numpy()]) for side in parts[number].T)
        scores[number] = agreement(first, second)

    run(look, len(parts), "looked at closely")
    return pairs[torch.cat(scores) > TWINS]


def as_floats(pictures: np.ndarray) -> Tensor:
    """(count, side, side) uint8 as float32."""
    return torch.from_numpy(pictures).float()


def features_of(pictures: np.ndarray, chosen: np.ndarray) -> Tensor:
    """What is coarse in each that is `chosen`: (count, FEATURES) of length 1, or 0 if it is flat.

    They are amplitudes of a cosine transform, each times the root of its frequency: as they are,
    the lowest would be nearly all of a photograph, and of no other.
    """
    place, size = torch.arange(SIDE), math.isqrt(FEATURES + 1)
    waves = torch.cos(math.pi * (2 * place + 1) * torch.arange(size)[:, None] / (2 * SIDE))
    frequency = torch.hypot(*torch.meshgrid([torch.arange(float(size))] * 2, indexing="ij"))
    # bfloat16 is exact enough to choose by, and with AMX four times as fast; where a processor has
    # neither, float32 is.
    kind = torch.bfloat16 if torch.cpu._is_amx_tile_supported() else torch.float32
    features = torch.zeros((len(chosen), FEATURES), dtype=kind)
    for first in range(0, len(chosen), 4096):
        part = as_floats(pictures[chosen[first : first + 4096]])
        amplitudes = (waves @ part @ waves.T * frequency.sqrt()).flatten(1)[:, 1:]
        amplitudes[part.std((1, 2)) < FLAT] = 0
        features[first : first + 4096] = torch.nn.functional.normalize(amplitudes)
    return features


def alike_from(features: Tensor, first: int) -> Tensor:
    """The most similar pictures after each of `ROWS` from `first` on: (pairs, 2) int64."""
    rows = features[first : first + ROWS]
    pairs, scores = [torch.empty((0, 2), dtype=torch.int64)], [torch.empty(0)]
    for start in range(first, len(features), COLUMNS):
        alike = rows @ features[start : start + COLUMNS].T
        some = (alike.amax(1) > ALIKE).nonzero()[:, 0]  # to find all single ones takes longer
        values, columns = alike[some].float().topk(min(2 * NEAREST, alike.shape[1]))
        both = torch.stack((first + some[:, None].expand_as(columns), start + columns), dim=2)
        chosen = (values > ALIKE) & (both[..., 0] < both[..., 1])
        pairs.append(both[chosen])
        scores.append(values[chosen])
    whole, order = torch.cat(pairs), torch.cat(scores).argsort(descending=True)
    whole = whole[order][whole[order, 0].argsort(stable=True)]  # by picture, the best of each first
    begins = torch.searchsorted(whole[:, 0].contiguous(), whole[:, 0].contiguous())
    return whole[torch.arange(len(whole)) - begins < NEAREST]


def agreement(first: Tensor, second: Tensor) -> Tensor:
    """How far pairs of pictures agree in detail, from -1 to 1: (pairs,); -1: not even coarsely.

    Both are (pairs, SIDE, SIDE) float32.
    """
    scores = torch.full((len(first),), -1.0)
    coarse = [torch.nn.functional.avg_pool2d(p[:, None], 2)[:, 0] for p in (first, second)]
    places = torch.tensor([1.0, 0.0, 1.0, 0.0]).repeat(len(first), 1)
    places = lay(*coarse, places, blur=1.5)
    places[:, 1::2] *= 2  # pixels of half the size
    hope = (detail_of(first, second, places) > HOPELESS).nonzero()[:, 0]
    if not len(hope):
        return scores
    first, second, places = first[hope], second[hope], places[hope]
    for blur in (1.5, 0.7):
        places = lay(first, second, places, blur)
    scores[hope] = detail_of(first, second, places)
    return scores


def lay(first: Tensor, second: Tensor, places: Tensor, blur: float) -> Tensor:
    """Lay each of `first` on its one of `second` more closely, and return where.

    Places are (pairs, 4): scale and shift in pixels, of rows and of columns. It is the method of
    Lucas and Kanade, with the gradient of the picture that stays (https://www.ri.cmu.edu/pub_files/
    pub3/baker_simon_2002_3/baker_simon_2002_3.pdf), of pictures as blurred as they are apart.
    """
    side = first.shape[1]
    matrix = blur_matrix(side, blur)
    moved, kept = (standard(matrix @ pictures @ matrix.T) for pictures in (first, second))
    gradient = torch.zeros((*kept.shape, 4))
    gradient[:, 1:-1, :, 1] = (kept[:, 2:] - kept[:, :-2]) / 2
    gradient[:, :, 1:-1, 3] = (kept[:, :, 2:] - kept[:, :, :-2]) / 2
    middle = torch.arange(side) - (side - 1) / 2
    gradient[..., 0] = gradient[..., 1] * middle[:, None]
    gradient[..., 2] = gradient[..., 3] * middle
    columns = gradient.flatten(1, 2).transpose(1, 2)  # (pairs, 4, pixels)
    square = columns @ columns.transpose(1, 2)
    # A little more on the diagonal: one edge alone can be moved along itself at will.
    square += torch.diag_embed(0.01 * square.diagonal(dim1=1, dim2=2) + 0.01)
    solve = torch.linalg.inv(square) @ columns
    for _ in range(4):
        error = (kept - warp(moved, places)) * overlap(side, places)
        places = places + (solve @ error.flatten(1)[..., None])[..., 0]
        places[:, 0::2] = places[:, 0::2].clamp(1 / MOST_SCALED, MOST_SCALED)
        places[:, 1::2] = places[:, 1::2].clamp(-MOST_MOVED, MOST_MOVED)
    return places


def detail_of(first: Tensor, second: Tensor, places: Tensor) -> Tensor:
    """Correlation of what is fine in pairs of pictures, or of that in their middle if it is less.

    The rest, what is of more than a few pixels, agrees in far too many pictures.
    """
    side = first.shape[1]
    near, far = blur_matrix(side, 0.6), blur_matrix(side, 2.0)
    fine = [near @ p @ near.T - far @ p @ far.T for p in (warp(first, places), second)]
    both = overlap(side, places)
    inner = both.clone()
    inner[:, :EDGE] = inner[:, -EDGE:] = inner[:, :, :EDGE] = inner[:, :, -EDGE:] = 0
    return torch.minimum(correlation(*fine, both), correlation(*fine, inner))


def correlation(first: Tensor, second: Tensor, part: Tensor) -> Tensor:
    """Of pairs of pictures, where `part` is 1: (pairs,)."""
    count = part.sum((1, 2), keepdim=True).clamp(min=1)
    first, second = (
        (p - (p * part).sum((1, 2), keepdim=True) / count) * part for p in (first, second)
    )
    lengths = (first.square().sum((1, 2)) * second.square().sum((1, 2))).sqrt()
    return (first * second).sum((1, 2)) / lengths.clamp(min=1e-3)


def warp(pictures: Tensor, places: Tensor) -> Tensor:
    """Pictures as they are seen at `places`, linear between pixels."""
    rows, columns = (points(pictures.shape[1], *places[:, i : i + 2].T) for i in (0, 2))
    pixels = torch.arange(pictures.shape[1])

    def weights(at: Tensor) -> Tensor:
        return (1 - (at.clamp(0, len(pixels) - 1)[..., None] - pixels).abs()).clamp(min=0)

    return weights(rows) @ pictures @ weights(columns).transpose(1, 2)


def overlap(side: int, places: Tensor) -> Tensor:
    """Where both pictures are, 1, and 0 elsewhere: (pairs, side, side)."""
    within = []
    for start in (0, 2):
        at = points(side, *places[:, start : start + 2].T)
        within.append(((at > -0.5) & (at < side - 0.5)).float())
    return within[0][:, :, None] * within[1][:, None]


def points(side: int, scale: Tensor, shift: Tensor) -> Tensor:
    """Where pixels of a row or column lie in that of the other picture: (pairs, side)."""
    middle = (side - 1) / 2
    return (torch.arange(side) - middle) * scale[:, None] + middle + shift[:, None]


def standard(pictures: Tensor) -> Tensor:
    """Pictures of mean 0 and standard deviation 1."""
    pictures = pictures - pictures.mean((1, 2), keepdim=True)
    return pictures / pictures.std((1, 2), keepdim=True).clamp(min=1e-3)


def blur_matrix(side: int, radius: float) -> Tensor:
    """What blurs columns of `side` pixels by a Gaussian: (side, side)."""
    pixels = torch.arange(side)
    weights = torch.exp(-((pixels[:, None] - pixels) / radius).square() / 2)
    weights[weights < 1e-6] = (
        0  # the least would be denormal, with which products take 100 x as long
    )
    return weights / weights.sum(1, keepdim=True)


def groups_of(pairs: Tensor, count: int) -> Tensor:
    """The lowest number of those that each of `count` is joined with by pairs: (count,) int64."""
    lowest = torch.arange(count)
    while True:
        first, second = lowest[pairs.T]
        least = torch.minimum(first, second)
        joined = lowest.scatter_reduce(0, torch.cat((first, second)), least.repeat(2), "amin")
        joined = joined[joined]
        if torch.equal(joined, lowest):
            return lowest
        lowest = joined
