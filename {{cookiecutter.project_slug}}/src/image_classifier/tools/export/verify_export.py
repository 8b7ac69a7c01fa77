"""Verify that an exported file predicts what the model predicts, on real images."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...data import BadImageError, Source, centre_crop, open_dataset
from ...errors import FaultError, UserError
from ...evaluate import LoadedModel
from ...runtime.console import some
from .formats import Predict

BATCH = 7  # images that are predicted together


@dataclass(frozen=True)
class Reference:
    """Real images as an exported file takes them, and the predictions of the model itself."""

    inputs: list[Tensor]  # of one image each: (1, ...)
    batch: Tensor  # (BATCH, ...): the first images, cut to squares; repeated if there are fewer
    probabilities: Tensor  # (count, classes) float32
    top1: float  # fraction of the images whose most probable class is right
    is_raw: bool  # the inputs are normalised, and the file is to give logits


def open_images(trained: LoadedModel, split: str, root: str) -> Source:
    """The images of `split`, in `root` unless that is empty.

    Raises:
        UserError: if they cannot be opened, or have other classes than the model.
    """
    data = trained.config.data
    source = open_dataset(replace(data, root=root or data.root), split)
    if source.classes != trained.classes:
        raise UserError(
            f"{str(trained.path)!a} knows the classes {some(trained.classes)}, which are "
            f"not those of the images: {some(source.classes)}"
        )
    source.check_labels(split)
    return source


@torch.inference_mode()
def predict_with_model(trained: LoadedModel, source: Source, is_raw: bool) -> Reference:
    """Predict all images of `source` with the code of evaluation.

    Raises:
        UserError: if no image can be read, or one cannot and such are not to be skipped.
    """
    data, model, normalize = trained.config.data, trained.model, trained.normalize
    side = data.eval_size
    inputs, squares, probabilities, num_right = [], [], [], 0
    for index, label in enumerate(source.labels.tolist()):
        try:
            pixels = source.read(index)
        except BadImageError:
            if data.on_bad_image == "stop":
                raise
            continue
        square = torch.empty((side, side, 3), dtype=torch.uint8)
        centre_crop(pixels, square)
        planes = square[None].permute(0, 3, 1, 2)
        if is_raw:
            given = crop = normalize(planes)
            logits = model(crop)
        else:
            given, crop = pixels[None], square[None]
            logits = sum(weight * model(view) for view, weight in normalize.views(planes))
        inputs.append(given)
        squares.append(crop)
        probabilities.append(logits.softmax(1))
        num_right += int(logits.argmax()) == label
    if not inputs:
        raise UserError("there are no images that can be read, to verify the files with")
    batch = torch.cat([squares[n % len(squares)] for n in range(BATCH)])
    top1 = num_right / len(inputs)
    return Reference(inputs, batch, torch.cat(probabilities), top1, is_raw)


@torch.inference_mode()
def verify(predict: Predict, reference: Reference, tolerance: float) -> str:
    """Compare a file with the model, image by image and on a batch; returns the result in words.

    Args:
        predict: what predicts from the file.
        reference: the images, and the predictions of the model.
        tolerance: the largest difference of two probabilities.

    Raises:
        FaultError: if a probability differs by more than `tolerance`, or is not a number.
    """
    expected = reference.probabilities
    found = torch.cat([*map(predict, reference.inputs), predict(reference.batch)])
    found = found.softmax(1) if reference.is_raw else found
    wanted = torch.cat([expected, expected[torch.arange(BATCH) % len(expected)]])
    largest = (found - wanted).abs().max()
    num_same = int((found[: len(expected)].argmax(1) == expected.argmax(1)).sum())
    result = (
        f"probabilities within {largest.item():.1e} of the model's, the same class for "
        f"{num_same:,} of {len(expected):,} images"
    )
    if not largest <= tolerance:  # also true for nan
        raise FaultError(
            f"not written, as its predictions differ: {result}; --tolerance {tolerance:g}"
        )
    return result
