"""Which part of a dataset has the images of a split."""

from collections.abc import Collection

from ...config import DataConfig
from ...data import check_fold, find_parts
from ...errors import UserError


def choose_part(names: Collection[str], data: DataConfig, split: str) -> tuple[str, bool]:
    """The part of a dataset with the images of `split`, and whether `data.fold` divides it.

    Without a part for validation, that is a share of `train`.

    Raises:
        UserError: if there is no such part, or it is not divided and `data.fold` is not the first.
    """
    parts = find_parts(names)
    check_fold(parts.get("val"), data.fold, data.root)
    is_divided = "val" not in parts and split in ("train", "val")
    part = "train" if is_divided else split
    if part not in parts:
        raise UserError(f"{data.root!a} has no {part!r}, only {', '.join(map(ascii, names))}")
    return parts[part], is_divided
