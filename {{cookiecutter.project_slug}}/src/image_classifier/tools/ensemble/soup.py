"""The mean of the weights of runs that began alike: https://arxiv.org/abs/2203.05482."""

import torch
from torch import Tensor

from ...checkpoints import Best, load_model
from ...config import ComputeConfig
from ...errors import UserError
from ...extensions import flag
from ...metrics import Decision, better, choose_decision, metric_text
from ...models import load_weights
from ...runtime.distributed import join_world
from ...tasks import metric_of
from .members import knobs_of, other_knob

# What decides which images validate a run.
IMAGES = ("data.name", "data.root", "data.labels", "data.columns", "data.limit")
IMAGES += ("data.val_fraction", "data.fold", "data.groups", "data.test_fraction")
NEAR = 0.01  # by how much of it a number of a normalization may differ


def average_weights(
    members: list[Best], compute: ComputeConfig
) -> tuple[dict[str, Tensor], Decision] | None:
    """The mean of the members' weights, and its decision; None if it is no better than each.

    All are compared on the validation images. Prints the scores.

    Raises:
        UserError: if the members did not begin with the same weights, or were validated on
            different images, or these can't be read.
    """
    first = members[0]
    for member in members:
        check_origin(first, member)
    metric = metric_of(first.config)
    weights = mean_weights([member.weights for member in members])
    scores = []
    with join_world(compute) as world:
        loaded = load_model(str(first.path), compute, world)
        images = loaded.open_images("val", world)
        each = {ascii(str(member.path)): member.weights for member in members}
        for name, own in (each | {"the mean of their weights": weights}).items():
            load_weights(loaded.model, own)
            found = loaded.evaluate(images)
            scores.append(found.value(metric))
            print(f"{metric_text(metric, scores[-1])}: {name}")
    *others, of_mean = scores
    best = max(others, key=lambda score: better(metric) * score)
    if not better(metric) * of_mean > better(metric) * best:
        print(
            "no gain: the mean of the weights is not better than the best run; nothing is written"
        )
        return None
    return weights, choose_decision(found.predictions, first.config.run)


def check_origin(first: Best, member: Best) -> None:
    """Check that the weights of two members can be averaged, and the mean be judged.

    Raises:
        UserError: if not.
    """
    instead = "take --average probabilities"
    name = ascii(str(member.path))
    origin = first.config.run.init_from
    own = member.config.run.init_from
    if not own or own != origin:
        began = f"those of {own}" if own else "random weights"
        raise UserError(
            f"{name} began with {began}: weights can be averaged only of runs that began with the "
            f"same pretrained weights; {instead}"
        )
    if knob := other_knob(first, member, IMAGES):
        raise UserError(
            f"{name} was validated on other images than {str(first.path)!a} (--{flag(knob)} "
            f"{knobs_of(member)[knob]}, not {knobs_of(first)[knob]}), so none can tell whether the "
            f"mean of their weights is better: {instead}"
        )
    pairs = zip(first.mean + first.std, member.mean + member.std, strict=True)
    if any(abs(a - b) > NEAR * a for a, b in pairs):
        raise UserError(
            f"{name} knows images that are normalized otherwise than for {str(first.path)!a}: "
            f"{instead}"
        )


def mean_weights(each: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of weights and statistics, by name; whole numbers, which count, are the first's."""
    return {
        name: torch.stack([weights[name].double() for weights in each]).mean(0).to(weight.dtype)
        if weight.is_floating_point()
        else weight
        for name, weight in each[0].items()
    }
