"""Divides images by groups, and holds some out for a test."""

import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from ...config import DataConfig
from ...data import divide
from ...errors import UserError
from ...runtime.console import some

MOST_GROUPS = 10_000  # that are balanced; of more, a hash of their names is as good
PARTS = 20  # equal ones at most, of which a share is some


def change_split(  # noqa: PLR0917 - what `divide` is given
    is_own: np.ndarray,
    names: Sequence[bytes],
    labels: Tensor,
    data: DataConfig,
    split: str,
    are_groups: bool,
) -> np.ndarray:
    """Which images are for `split`, train, val or test: (count,) bool; else `is_own`, alike.

    `names` are paths, or those of groups if they `are_groups`. The images for the test are chosen
    first, whatever `data.val_fraction` and `data.fold` are.

    Raises:
        UserError: if a path has no group, or there are too few groups.
    """
    if not (are_groups or data.groups or data.test_fraction):
        return is_own
    if are_groups and data.groups:
        raise UserError(f"--data.groups {data.groups!a}: the table has a column of groups: which?")
    groups = groups_of(names, data.groups) if data.groups else names
    pick = choose if are_groups or data.groups else by_hash
    plain = replace(data, groups="", test_fraction=0.0)
    is_test = np.zeros(len(names), bool)
    if data.test_fraction:
        # Other words than those of validation: else the test would be its first part.
        salted = [b"test " + name for name in groups]
        whole = replace(plain, val_fraction=data.test_fraction, fold=0)
        is_test = pick(salted, labels, whole, "--data.test-fraction")
    if split == "test":
        return is_test
    rest = np.flatnonzero(~is_test)
    is_val = np.zeros(len(names), bool)
    own = [groups[index] for index in rest]
    is_val[rest] = pick(own, labels[torch.from_numpy(rest)], plain, "--data.val-fraction")
    return ~is_test & (is_val == (split == "val"))


def check_own(parts: Mapping[str, str], place: str, data: DataConfig, split: str) -> None:
    """Raise `UserError` if images that a run trains with are divided already.

    `parts` are those of `place`, with their names there.
    """
    if split != "train":
        return
    fraction = f"--data.test-fraction {data.test_fraction:g}: {place!a}"
    if data.test_fraction and "test" in parts:
        own = parts["test"]
        raise UserError(f"{fraction} has test images of its own, in {own!a}: --run.score-test")
    if data.test_fraction and "val" in parts:
        raise UserError(f"{fraction} has images for validation, but no part 'test': make that")
    if data.groups and "val" in parts:
        raise UserError(
            f"--data.groups {data.groups!a}: {place!a} has validation images of its own, in "
            f"{parts['val']!a}: divide it by groups yourself, or leave out --data.groups"
        )


def groups_of(names: Sequence[bytes], pattern: str) -> list[bytes]:
    """The part of each path that the pattern finds.

    Raises:
        UserError: if it finds none in a path.
    """
    known = re.compile(pattern)
    found = [known.search(os.fsdecode(name)) for name in names]
    if without := [os.fsdecode(n) for n, match in zip(names, found, strict=True) if not match]:
        raise UserError(
            f"--data.groups {pattern!a} finds no group in {len(without):,} of {len(names):,} "
            f"paths, such as {without[0][:80]!a}"
        )
    return [os.fsencode(match[known.groups] or "") for match in found]


def by_hash(names: list[bytes], labels: Tensor, data: DataConfig, knob: str) -> np.ndarray:
    """The images that `divide` chooses for validation: (count,) bool; UserError if there are none.

    `knob` is the option that says how many.
    """
    is_chosen = np.ones(len(names), bool)
    is_chosen[divide(names, labels, data, "train").numpy()] = False
    if len(names) and not is_chosen.any():
        chooses = f"{knob} {data.val_fraction:g} chooses none of {len(names):,} images"
        raise UserError(f"{chooses}: set a larger one, or add images")
    return is_chosen


def choose(groups: list[bytes], labels: Tensor, data: DataConfig, knob: str) -> np.ndarray:
    """A share `data.val_fraction` of the images, the `data.fold`-th: (count,) bool.

    By a hash of each name, as without groups; groups of several images are balanced, in number of
    images and by class, and then the choice depends on all of them.

    Raises:
        UserError: if there are too few groups.
    """
    names, numbers = np.unique(groups, return_inverse=True)
    if len(names) == len(groups) or len(names) > MOST_GROUPS:
        return by_hash(groups, labels, data, knob)
    from sklearn.model_selection import StratifiedGroupKFold

    count = round(1 / data.val_fraction)
    if not 2 <= count <= len(names):
        most = f"from {1 / len(names):.2g} to 0.5" if len(names) > 1 else "more groups are needed"
        raise UserError(
            f"{len(names):,} groups, such as {some(tuple(map(os.fsdecode, names[:3])))}, can't be "
            f"divided by {knob} {data.val_fraction:g}: {most}"
        )
    kinds = labels.numpy() if labels.ndim == 1 else rarest(labels.numpy())
    # Of so many equal parts, as many as are the share: 0.4 is two of five.
    largest = int(np.unique(kinds, return_counts=True)[1].max())  # class: no more parts have one
    parts = max(count, min(PARTS, largest, len(names)))
    share = Fraction(data.val_fraction).limit_denominator(parts)
    folds = StratifiedGroupKFold(share.denominator, shuffle=True, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a class with fewer images than folds
        try:
            divided = [chosen for _, chosen in folds.split(kinds, kinds, numbers)]
        except ValueError as error:  # so has every class
            raise UserError(f"{knob} {data.val_fraction:g}: {error}") from error
    is_chosen = np.zeros(len(groups), bool)
    start = data.fold * share.numerator
    for chosen in divided[start : start + share.numerator]:
        is_chosen[chosen] = True
    for kind in np.setdiff1d(kinds, kinds[~is_chosen]):  # a class stays for training
        first = numbers[np.flatnonzero(kinds == kind)[0]]
        is_chosen[numbers == first] = False
    return is_chosen


def rarest(labels: np.ndarray) -> np.ndarray:
    """The rarest of the labels of each image, by which several labels are balanced: (count,)."""
    has = labels == 1
    rarity = has.sum(0)[::-1].argsort(kind="stable")[::-1]
    order = (len(rarity) - 1 - rarity)[::-1]  # of classes, the rarest first
    return np.where(has.any(1), order[has[:, order].argmax(1)], -1)
