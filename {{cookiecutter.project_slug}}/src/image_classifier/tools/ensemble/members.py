"""The runs that become one model, and whether they fit together."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ...checkpoints import Best, load_best
from ...errors import UserError
from ...extensions import flag
from ...runtime.config_dict import flatten
from ...runtime.console import some
from ...runtime.files import read_object
from ...runtime.run_dir import best_checkpoint

# What members have in common: the network, and images as it takes them.
SAME = ("model.", "data.image_size", "data.test_size", "data.channels", "data.bits", "data.fit")
SAME += ("augment.tta",)
OF_TRAINING = ("model.dropout", "model.drop_path", "model.lora_rank")  # knobs of training alone
MOST = 100  # the range of `model.members`
MOST_APART = 0.02  # of the means of a color, where images are padded with it; folds differ by less


def load_members(words: Sequence[str]) -> list[Best]:
    """The trained models that the words of a command line name, once they can be one model.

    Raises:
        UserError: if one can't be read, there are fewer than 2, or they do not fit together.
    """
    paths = [path for word in words for path in checkpoints_of(word)]
    if not 2 <= len(paths) <= MOST:
        named = f"{len(paths)} run" + "s" * (len(paths) != 1)
        raise UserError(
            f"an ensemble is of 2 to {MOST} runs, and {named} is named: name run folders, or the "
            "folder of all runs of `cross-validate` or `repeat`"
        )
    members = [load_best(path) for path in paths]
    for number, member in enumerate(members):
        check_member(member, members[:number])
    return members


def checkpoints_of(word: str) -> list[Path]:
    """The checkpoint of a run, or those of all runs of `cross-validate` or `repeat`.

    Raises:
        UserError: if there is neither.
    """
    folder = Path(word)
    best = best_checkpoint(word)
    if best.exists() or not (folder / "results.json").exists():
        return [best]  # where there is none, that is told when it is read
    try:
        runs = read_object(folder / "results.json")["runs"]
        # By their names in this folder, which may have moved.
        return [folder / Path(run["folder"]).name / best.relative_to(folder) for run in runs]
    except (OSError, LookupError, TypeError) as error:
        raise UserError(
            f"{str(folder / 'results.json')!a} is not of `cross-validate` or `repeat`: name the "
            "run folders"
        ) from error


def check_member(member: Best, others: list[Best]) -> None:
    """Check that `member` can be one model with those before it.

    Raises:
        UserError: if not, naming the first reason.
    """
    name = ascii(str(member.path))
    if member.config.model.members > 1:
        raise UserError(f"{name} is an ensemble already: name the runs that it was made of")
    for other in others:
        if other.digest == member.digest:
            raise UserError(f"{name} is the same file as {str(other.path)!a}: name each run once")
    if not others:
        return
    first = others[0]
    than = ascii(str(first.path))
    if member.classes != first.classes:
        raise UserError(
            f"{name} knows the classes {some(member.classes)}, which are not those of {than}: "
            f"{some(first.classes)}"
        )
    if knob := other_knob(first, member, SAME, OF_TRAINING):
        own, usual = knobs_of(member)[knob], knobs_of(first)[knob]
        raise UserError(
            f"{name} has --{flag(knob)} {own}, {than} has {usual}: an ensemble is of one kind of "
            "network, on images of one kind"
        )
    pairs = zip(member.mean, first.mean, strict=True)
    if first.config.data.fit == "pad" and any(
        abs(own - usual) > MOST_APART for own, usual in pairs
    ):
        own, usual = (", ".join(f"{mean:.3g}" for mean in of.mean) for of in (member, first))
        raise UserError(
            f"{name} pads images with its mean color, {own}, and {than} with {usual}: with "
            "--data.fit pad, an ensemble is of runs that normalize alike, as from the same weights"
        )
    if shapes_of(member.weights) != shapes_of(first.weights):
        raise UserError(f"{name} holds weights of another network than {than}")


def other_knob(
    first: Best, second: Best, names: tuple[str, ...], without: tuple[str, ...] = ()
) -> str:
    """The first knob that begins with one of `names` and that two models do not share, or none."""
    theirs = knobs_of(second)
    for knob, value in knobs_of(first).items():
        if knob.startswith(names) and knob not in without and theirs[knob] != value:
            return knob
    return ""


def knobs_of(member: Best) -> dict[str, Any]:
    """The knobs of a run, by their dotted names."""
    return flatten(member.config)


def shapes_of(weights: dict[str, Tensor]) -> dict[str, tuple[Any, ...]]:
    """The shapes and types of weights, by their names."""
    return {name: (weight.shape, weight.dtype) for name, weight in weights.items()}
