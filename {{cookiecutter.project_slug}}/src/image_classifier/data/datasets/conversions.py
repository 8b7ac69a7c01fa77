"""What a `Source` can be made of, and what converts to it what people commonly have."""

import math
from typing import Any

import numpy as np
from torch import Tensor

from ...config import UserError
from .paths import PathList

WIDER = ("int16", "uint16")  # of which nobody knows which bits are the pixels


class SourceError(UserError):
    """What a `Source` was made of is not what it holds; the line says what converts it."""


def misfit(name: str, value: Any, wanted: str, fix: str) -> SourceError:  # noqa: ANN401
    """What to raise for a field; `fix` is the expression that makes of `value` what is wanted."""
    found = f"a {type(value).__name__}"
    if isinstance(value, np.ndarray | Tensor):
        place = f" on {value.device}" if is_elsewhere(value) else ""
        found = f"{tuple(value.shape)} {kind(value)}{place}"
    elif isinstance(value, str | int | float | tuple) or value is None:
        found = f"{value!a:.60}"
    hint = f": {name}={fix}" if fix else ""
    return SourceError(f"{name} should be {wanted}, not {found}{hint}")


def check_labels(labels: Any) -> None:  # noqa: ANN401 - people have all kinds
    """Refuse labels that are not (count,) int64.

    Raises:
        SourceError: with what converts them.
    """
    fix = ""
    match labels:
        case [str(), *_] | np.ndarray(dtype=np.dtype(kind="U")):
            fix = "torch.tensor([classes.index(name) for name in labels])"
        case [*_]:
            fix = "torch.tensor(labels)"
        case Tensor(ndim=2) | np.ndarray(ndim=2):
            is_one_hot = labels.shape[1] > 1
            fix = on_cpu("labels", labels) + (".argmax(1)" if is_one_hot else ".flatten().long()")
        case Tensor() | np.ndarray():
            fix = on_cpu("labels", labels)
            fix += ".long()" if kind(labels) != "int64" else ""
            if fix == "labels" and labels.ndim == 1:
                return
    raise misfit("labels", labels, "a tensor (count,) int64", fix)


def check_classes(classes: Any) -> None:  # noqa: ANN401
    """Refuse names of classes that are not a tuple of text.

    Raises:
        SourceError: with what converts them.
    """
    fix = ""
    match classes:
        case int():
            fix = "tuple(map(str, range(classes)))"
        case tuple() if classes and all(type(name) is str for name in classes):
            return  # NumPy's text is of another type, and no checkpoint with it can be read
        case [_, *_] | dict() | np.ndarray():
            fix = "tuple(map(str, classes))"
    raise misfit("classes", classes, "a tuple of text, the name of each class", fix)


def check_images(pixels: Any, paths: Any, count: int) -> None:  # noqa: ANN401
    """Refuse images that are not `count`, in pixels or in files.

    Raises:
        SourceError: with what converts them.
    """
    if (pixels is None) == (paths is None):
        both = "neither" if pixels is None else "both"
        raise SourceError(f"images should be in pixels or in paths, not in {both}")
    if pixels is not None and (fix := as_pixels(pixels)) != "pixels":
        raise misfit("pixels", pixels, "a tensor (count, height, width, 3) uint8 of 0 to 255", fix)
    if paths is not None and not isinstance(paths, PathList):
        raise misfit("paths", paths, "a PathList", "PathList(folder, paths)")
    images = paths if pixels is None else pixels
    if len(images) != count:
        raise SourceError(f"there are {count:,} labels, but {len(images):,} images")


def as_pixels(pixels: Any) -> str:  # noqa: ANN401
    """The expression that makes pixels (count, height, width, 3) uint8; "" if there is no saying.

    Of pixels that are so already it is `pixels`.
    """
    match pixels:
        case [Tensor(), *_]:
            return "torch.stack(pixels)"
        case [np.ndarray(), *_]:
            return "np.stack(pixels)"
        case Tensor() | np.ndarray():
            fix, layout = on_cpu("pixels", pixels), layout_of(*pixels.shape)
        case _:
            return ""
    if "float" in kind(pixels):  # from 0 to 1, as torchvision's transforms make them
        fix = f"({fix} * 255).round().byte()"
    elif kind(pixels) != "uint8":
        fix += ".byte()"
    return "" if layout is None or kind(pixels) in WIDER else fix + layout


def layout_of(*shape: int) -> str | None:
    """What makes images of this shape (count, height, width, 3); None if there is no saying."""
    match shape:
        case (_, _, _, 3):
            return ""
        case (_, 3, _, _):
            return ".permute(0, 2, 3, 1)"
        case (_, 1, _, _):  # grey, as the rest
            return ".permute(0, 2, 3, 1).expand(-1, -1, -1, 3)"
        case (_, _, _, 1):
            return ".expand(-1, -1, -1, 3)"
        case (_, _, _):
            return ".unsqueeze(3).expand(-1, -1, -1, 3)"
    return None


def three_floats(name: str, numbers: Any) -> tuple[float, float, float]:  # noqa: ANN401
    """The mean or the deviation `name` of each colour, as plain numbers.

    Raises:
        SourceError: if they are not three, or none that pixels from 0 to 1 can have.
    """
    wanted = "three numbers, of red, green and blue from 0 to 1"
    try:
        red, green, blue = map(float, numbers)
    except (TypeError, ValueError):
        raise misfit(name, numbers, wanted, "") from None
    colours = red, green, blue
    if name == "mean" and all(1 < value <= 255 for value in colours):
        raise misfit(name, colours, wanted, "tuple(value / 255 for value in mean)")
    if not all(math.isfinite(value) and (value > 0 or name == "mean") for value in colours):
        raise misfit(name, colours, wanted, "")
    return colours


def kind(values: np.ndarray | Tensor) -> str:
    """The type of the elements, as NumPy calls it."""
    return str(values.dtype).removeprefix("torch.")


def is_elsewhere(values: np.ndarray | Tensor) -> bool:
    """Whether it is in the memory of an accelerator."""
    return isinstance(values, Tensor) and values.device.type != "cpu"


def on_cpu(name: str, values: np.ndarray | Tensor) -> str:
    """The expression that makes an array a tensor on the CPU."""
    if isinstance(values, np.ndarray):
        return f"torch.from_numpy({name})"
    return f"{name}.cpu()" if is_elsewhere(values) else name
