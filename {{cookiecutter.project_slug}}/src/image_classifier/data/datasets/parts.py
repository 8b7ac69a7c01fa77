"""What the parts of a dataset are called, and which images are for validation if no part is."""

import hashlib
import math
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ...config import DataConfig
from ...errors import UserError
from ...extensions import chained, functions

USUAL = ("train", "val", "valid", "validation", "test")  # names that win over other spellings
ROLES = {"train": "train", "training": "train", "test": "test", "testing": "test"}
ROLES |= dict.fromkeys(("val", "valid", "validation"), "val")
ROLES |= dict.fromkeys(("pred", "prediction", "predictions"), "pred")  # images without labels
PART = re.compile(rf"({'|'.join(ROLES)})(?:set|data|images|imgs)?")
# Words beside these that do not tell one dataset from another: `train_images`, `Test Data`.
PLAIN = {"data", "dataset", "dir", "folder", "image", "images", "img", "imgs", "set", "split"}


def role_of(name: str) -> tuple[str, tuple[str, ...]]:
    """The part of a dataset that a name means, or "", and the words in it that are of no part.

    `Training` and `train_set` are ("train", ()), `seg_train` is ("train", ("seg",)).
    """
    words = re.findall(r"[^\W\d_]+|\d+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower())
    found = [match[1] for match in map(PART.fullmatch, words) if match]
    if len(found) != 1:
        return "", ()
    return ROLES[found[0]], tuple(w for w in words if not (w in PLAIN or PART.fullmatch(w)))


def part_of(name: str) -> str:
    """The part of a dataset that a name means whatever stands beside it: train, val or test."""
    role, others = role_of(name)
    return role if role in USUAL and not others else ""


def find_parts(names: Iterable[str]) -> dict[str, str]:
    """Which of `names` is which part of a dataset: train, val, test.

    A name with other words (`seg_train`) is a part if another part has the same ones. Of several
    for a part, one of the `USUAL` names counts.
    """
    groups: dict[tuple[str, ...], dict[str, str]] = defaultdict(dict)
    for name in sorted(names, key=lambda name: ((*USUAL, name).index(name), name)):
        role, others = role_of(name)
        if role:
            groups[others].setdefault(role, name)
    plain = groups.pop((), {})
    pairs = [parts for parts in groups.values() if "train" in parts and len(parts) > 1]
    return pairs[0] if "train" not in plain and len(pairs) == 1 else plain


def check_own(
    parts: Mapping[str, str], place: str, data: DataConfig, split: str, hint: str = ""
) -> None:
    """Raise `UserError` if `data` divides training images otherwise than in these `parts`."""
    if split == "train" and "val" in parts and data.fold:
        raise UserError(
            f"--data.fold {data.fold}: {place!a} has validation images of its own, in "
            f"{parts['val']!r}{hint}"
        )
    for check in functions("division", "check_own"):
        check(parts, place, data, split)


def check_fold(data: DataConfig) -> None:
    """Raise `UserError` for a fold that there is not."""
    if (data.fold + 1) * data.val_fraction > 1:
        raise UserError(
            f"--data.fold {data.fold}: with --data.val-fraction {data.val_fraction:g} there "
            f"are the folds 0 .. {int(1 / data.val_fraction) - 1}"
        )


def divide(
    names: Iterable[bytes], labels: Tensor, data: DataConfig, split: str, are_groups: bool = False
) -> Tensor:
    """Which images are for `split`, train or val: (count,) int64. A hash of each name decides.

    `labels` are as those of a `Source`; `names` may be of groups, which are on one side each.

    Raises:
        UserError: if there are none, or no such fold.
    """
    check_fold(data)
    names = [*names]
    digests = b"".join(hashlib.blake2b(name, digest_size=8).digest() for name in names)
    hashes = np.frombuffer(digests, ">u8").astype(np.uint64)
    is_own = are_for_val(hashes, labels.numpy(), data) == (split == "val")
    given = names, labels, data, split, are_groups
    chosen = np.flatnonzero(chained("division", "change_split", is_own, *given))
    if len(labels) and not len(chosen):
        cure = "add images"
        for share in (0.9, 0.5, 0.3):  # the last that helps is named
            larger = replace(data, val_fraction=max(share, data.val_fraction), fold=0)
            if are_for_val(hashes, labels.numpy(), larger).any():
                cure = f"add images, or set --data.val-fraction {share}"
        raise UserError(f"{data.root!a}: of {len(labels):,} images, none is for {split}: {cure}")
    return torch.from_numpy(chosen)


def are_for_val(hashes: np.ndarray, labels: np.ndarray, data: DataConfig) -> np.ndarray:
    """Whether images are for validation: (count,) bool, by their `hashes`, (count,) uint64.

    Where that leaves a class without training images, the one with the smallest hash stays.
    """
    start = math.ceil(data.fold * data.val_fraction * 2**64)
    stop = math.ceil((data.fold + 1) * data.val_fraction * 2**64)
    first = np.uint64(min(start, 2**64 - 1))
    last = np.uint64(min(stop - 1, 2**64 - 1))
    is_val = (first <= hashes) & (hashes <= last)
    if labels.ndim == 1:
        order = np.lexsort((hashes, labels))
        found, first = np.unique(labels[order], return_index=True)
        is_val[np.isin(hashes, hashes[order[first[~np.isin(found, labels[~is_val])]]])] = False
        return is_val
    has = labels == 1
    for number in np.flatnonzero(has.any(0) & ~has[~is_val].any(0)):
        is_val[hashes == hashes[has[:, number]].min()] = False
    return is_val


@lru_cache(100_000)
def look(name: str) -> str:
    """What a reader sees of a name: equal for `Café` in both forms of Unicode, `Cat ` and `cat`."""
    text = unicodedata.normalize("NFKC", name).casefold()
    return " ".join("".join(c for c in text if unicodedata.category(c) != "Cf").split())


def find_name(name: str, names: Sequence[str]) -> int:
    """Where `name` is in `names`, or the only one that looks like it; -1 if neither is."""
    if name in names:
        return names.index(name)
    alike = [number for number, other in enumerate(names) if look(other) == look(name)]
    return alike[0] if len(alike) == 1 else -1
