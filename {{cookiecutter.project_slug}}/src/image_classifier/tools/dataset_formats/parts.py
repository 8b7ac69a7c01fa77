"""Which part of a dataset has the images of a split."""

from collections.abc import Collection

from ...config import DataConfig
from ...data import check_own, find_parts
from ...errors import UserError


def choose_part(names: Collection[str], data: DataConfig, split: str) -> tuple[str, bool]:
    """The part of a dataset with the images of `split`, and whether `data.fold` divides it.

    Without a part for validation, that is a share of `train`; so are images that are held out.

    Raises:
        UserError: if there is no such part, or `data` divides the images otherwise.
    """
    parts = find_parts(names)
    check_own(parts, data.root, data, split)
    is_held_out = split == "test" and split not in parts and getattr(data, "test_fraction", 0) > 0
    is_divided = "val" not in parts and (is_held_out or split in ("train", "val"))
    part = "train" if is_divided else split
    if part not in parts:
        raise UserError(f"{data.root!a} has no {part!r}, only {', '.join(map(ascii, names))}")
    return parts[part], is_divided
