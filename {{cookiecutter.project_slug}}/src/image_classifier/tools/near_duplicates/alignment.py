"""Moves one image onto another, and compares their fine detail everywhere."""

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, affine_grid, grid_sample

BLUR = 7  # pixels of the box blur: what it takes away is fine detail
LEVELS, STEPS = (16, 32, 64), 3  # sides of the images that are aligned, and steps on each
MAX_WARP = 0.2  # largest change of size, and largest shift in halves of the side
WINDOW = {32: 5, 64: 7}  # pixels of a window's side, by that of the images
WORST = 0.03  # the share of the places with detail that may correlate less
NOISE = 2.0  # variance of JPEG noise in fine detail: less is no detail


def fine_detail(grays: Tensor) -> Tensor:
    """Images less their box blur."""
    return grays - box_blur(grays, BLUR)


def box_blur(images: Tensor, width: int) -> Tensor:
    """The mean of `width` x `width` pixels around each; `width` is odd."""
    line = torch.arange(images.shape[-1])
    near = ((line - line[:, None]).abs() <= width // 2).float()
    near /= near.sum(1, keepdim=True)
    return near @ images @ near.T  # faster than avg_pool2d


def aligned_correlation(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Correlation of fine detail once `second` is moved onto `first`: twice (pairs,).

    Of the whole images, and of the windows that correlate least (of those with detail, but for the
    share WORST), by the contrast and structure terms of SSIM
    (https://doi.org/10.1109/TIP.2003.819861).

    Args:
        first: (pairs, side, side) float32, gray from 0 to 255; `side` is 32 or 64.
        second: the same.
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
    return whole, ranked.gather(1, (WORST * has_detail.sum((1, 2))).long()[:, None])[:, 0]


def align(first: Tensor, second: Tensor, warp: Tensor) -> Tensor:
    """Improve `warp`, (pairs, 4), under which `second` resembles `first`: of the same shape.

    Gauss-Newton with the slopes of `first`, which stay the same: the inverse compositional method
    without the composition (https://doi.org/10.1023/B:VISI.0000011205.11775.fd).
    """
    side = first.shape[1]
    line = (torch.arange(side) + 0.5) * 2 / side - 1  # centers of the pixels, from -1 to 1
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


def warped(images: Tensor, warp: Tensor) -> tuple[Tensor, Tensor]:
    """Images scaled and moved: (count, side, side); 0 outside, and where that is not: bool.

    `warp` has by how much x and y grow, and by how much they are moved: (count, 4).
    """
    affine = torch.cat((torch.diag_embed(1 + warp[:, :2]), warp[:, 2:, None]), dim=2)
    grid = affine_grid(affine, images[:, None].shape, align_corners=False)
    is_inside = (grid.abs() <= 1).all(3)
    return grid_sample(images[:, None], grid, align_corners=False)[:, 0] * is_inside, is_inside
