"""A learning curve: what a linear probe reaches with a part of the training images, and with all.

Features are computed once, and kept: each point is a fit of the last layer alone. Whether more
images, or larger ones, tell classes apart is seen without training a network.
"""

import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import fmean, linear_regression
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...checkpoints import load_pretrained
from ...config import Config
from ...data import TrainData
from ...errors import FaultError, UserError
from ...runtime.distributed import World, join_world
from ...runtime.files import write_json
from ...runtime.launch import is_launched
from ...runtime.run_dir import open_run
from ...runtime.seeding import seed_everything
from ...settle import settle
from ...tracking import Setup
from ...train import Training
from ..linear_probe.features import Features, compute_features, left_out
from ..linear_probe.head import fit_layer
from .observer import certainty

SHARES = 0.125, 0.25, 0.5, 1.0
DRAWS = 4  # of each share but the whole
LARGER = 1.5  # times the side of the images
NORMAL = 1.96  # standard deviations of an interval of 95 %


class Images(NamedTuple):
    """Features of training and validation images, (count, width), and their labels, (count,)."""

    train: Tensor
    train_labels: Tensor
    val: Tensor
    val_labels: Tensor


def learning_curve(config: Config) -> None:
    """Print the curve and what it means, and write `learning_curve.json` to the run folder.

    Raises:
        UserError: if there are no trained weights, images have several labels or can't be used, or
            torchrun started this.
    """
    if config.model.task != "single-label":
        raise UserError("learning-curve is for images of one label each")
    if not config.run.init_from:
        raise UserError("learning-curve needs trained weights: --run.init-from FILE or pretrained")
    if is_launched():
        raise UserError("learning-curve is one process: start it without torchrun")
    with join_world(config.compute) as world, open_run(config, world):
        images = features_of(config, world)
        rows = curve_of(images, config.seed)
        print("training images  top-1 of a linear probe")
        for count, found in rows.items():
            draws = f" (mean of {len(found)} draws)" * (len(found) > 1)
            print(f"{count:>15,}  {mean_score(found):.2%}{draws}")
        whole = rows[max(rows)][0]
        lines = [more_images(rows)]
        print(lines[0])
        found = {"top1": {f"{count}": mean_score(row) for count, row in rows.items()}}
        side = config.data.eval_size
        larger = 32 * max(1, round(LARGER * side / 32))
        data = replace(config.data, image_size=larger, test_size=0)
        try:
            with_larger = score_of(features_of(replace(config, data=data), world), 1.0, config.seed)
        except (UserError, FaultError) as error:  # a network for images of one size; memory
            lines.append(f"images of {larger} pixels were not tried: {error}")
        else:
            found["image_size"] = {larger: mean_score([with_larger])}
            gain, width = mean_gain(with_larger, whole)
            lines.append(told(f"images of {larger} pixels in place of {side}", gain, width))
        print(lines[1])
        write_json(Path(config.run.dir) / "learning_curve.json", found | {"said": lines})


def features_of(config: Config, world: World) -> Images:
    """What the last layer gets of all images, by the weights that `config` begins with.

    Raises:
        UserError: if a class has no training image.
    """
    seed_everything(config.seed, config.deterministic, world.device)
    pretrained = load_pretrained(config, world)
    data = TrainData(config, world, pretrained.mean_std)
    config, _ = settle(config, data, world)
    training = Training(config, world, data, config.data.batch_size)
    pretrained.load_into(training.model, data.source.classes)
    found = []
    with closing(data), closing(data.open_split("val")) as val:
        how = training.model, training.precision, training.normalize
        setup = Setup(config, world, data, val, *how)
        with closing(data.open_split("train")) as train:
            for images in (train, val):
                features = compute_features(setup, images)
                known = ~left_out(features.labels)
                found += [features.values[known], features.labels[known]]
    images = Images(*found)
    if not images.train_labels.bincount().all():
        raise UserError("learning-curve needs a training image of each class up to the last one")
    return images


def curve_of(images: Images, seed: int) -> dict[int, list[Tensor]]:
    """By number of training images, what `score_of` finds: several draws of each but the whole."""
    rows: dict[int, list[Tensor]] = {}
    for share in SHARES:  # of small classes two shares may be as many images
        count = len(draw_share(images.train_labels, share, seed))
        draws = DRAWS if count < len(images.train) else 1
        if count not in rows:
            rows[count] = [score_of(images, share, seed + draw) for draw in range(draws)]
    return rows


def score_of(images: Images, share: float, seed: int) -> Tensor:
    """Which validation images a probe of a share of each class has right: (count,) float64."""
    chosen = draw_share(images.train_labels, share, seed)
    part = Features(images.train[chosen], images.train_labels[chosen], "")
    layer = nn.Linear(part.values.shape[1], int(images.train_labels.max()) + 1)
    fit_layer(layer, part, None, seed)
    return (layer(images.val).argmax(1) == images.val_labels).double()


def draw_share(labels: Tensor, share: float, seed: int) -> Tensor:
    """A share of the images of each class, one at least: their numbers, sorted."""
    chance = torch.rand(len(labels), generator=torch.Generator().manual_seed(seed))
    chosen = []
    for kind in labels.unique():
        own = (labels == kind).nonzero()[:, 0]
        chosen.append(own[chance[own].argsort()[: max(1, round(share * len(own)))]])
    return torch.cat(chosen).sort().values


def mean_score(found: list[Tensor]) -> float:
    """The mean share of right answers."""
    return fmean(float(right.mean()) for right in found)


def more_images(rows: dict[int, list[Tensor]]) -> str:
    """What more images have gained, and what as many again would, by a power law.

    Errors fall as a power of the number of images: https://arxiv.org/abs/1712.00409
    """
    least = min(rows)
    most = max(rows)
    if least == most:
        return f"{most:,} images are too few of each class for a curve"
    gain, width = mean_gain(rows[most][0], torch.stack(rows[least]).mean(0))
    text = told(f"{most:,} images in place of {least:,}", gain, width)
    if gain <= width:
        return f"{text}; more of the same kind may not help"
    x = [math.log(count) for count in rows]
    y = [math.log(1 - mean_score(found) + 1e-6) for found in rows.values()]
    slope, _ = linear_regression(x, y)
    further = (1 - mean_score(rows[most])) * (1 - 2**slope)
    return f"{text}; as many again would gain about {100 * further:+.1f}, by the curve"


def mean_gain(more: Tensor, fewer: Tensor) -> tuple[float, float]:
    """The mean difference of two scores of the same images, (count,) each, and half its interval.

    https://en.wikipedia.org/wiki/Paired_difference_test
    """
    differences = (more - fewer).double()
    if len(differences) < 2:
        return float(differences.mean()), 1.0
    # A scatter of half an image at least: a few equal ones prove nothing.
    scatter = torch.clamp(differences.std(), min=0.5 / math.sqrt(len(differences)))
    return float(differences.mean()), NORMAL * float(scatter) / math.sqrt(len(differences))


def told(what: str, gain: float, width: float) -> str:
    """A gain in words, and whether it may be chance."""
    return f"{what}: {100 * gain:+.1f} points{certainty(gain - width, gain + width)}"
