"""Write a trained model as files that do not need this package, each verified against the model."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...config import ComputeConfig
from ...data import BadImageError, Source, fit_square, open_dataset
from ...errors import FaultError, UserError
from ...metrics import metric_text
from ...predictions import counted_and_correct
from ...runtime.distributed import join_world
from ...runtime.files import remove_leftovers, write_whole
from ...tasks import TASKS
from ..loaded_model import LoadedModel, load_model
from .command import ExportOptions
from .export_graph import ExportModule
from .formats import FORMATS, Predict, check_libraries

BATCH = 7  # images that are predicted together


def export(options: ExportOptions) -> None:
    """Write the best weights of `options.run` in each format of `options.format`.

    Raises:
        UserError: if there is no such run, its images cannot be read, or a library is missing.
        FaultError: if a file cannot be written, or predicts otherwise than the model.
    """
    if "onnx" in options.format:
        check_libraries()
    # Plain float32 on the CPU, in the usual memory format: channels_last is for training only.
    compute = ComputeConfig(device="cpu", channels_last=False)
    with join_world(compute) as world:
        trained = load_model(options.run, compute, world)
    torch.set_float32_matmul_precision("highest")  # some processors round on the way otherwise
    data = replace(trained.config.data, root=options.root or trained.config.data.root)
    source = open_dataset(data, options.split)
    source = trained.check_images(source, options.split)
    run = Path(options.run)
    folder = Path(options.out or (run if run.is_dir() else run.parent) / "export")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder, "model.*")
    except OSError as error:
        raise UserError(f"cannot write to {str(folder)!a}: {error.strerror}") from error
    source = source.thinned(min(options.images, len(source)))
    reference = predict_with_model(trained, source, options.raw)
    print(
        f"weights {trained.origin} from {str(trained.path)!a}, in float32: "
        f"{reference.score} of {len(reference.inputs):,} {options.split} images"
    )
    module = ExportModule(trained, options.raw).eval().requires_grad_(False)
    for name in dict.fromkeys(options.format):
        content, predict = FORMATS[name](module)
        result = verify(predict, reference, options.tolerance)
        path = folder / f"model.{name}"
        try:
            write_whole(path, lambda file, content=content: file.write(content))
        except OSError as error:
            raise FaultError(f"cannot write {str(path)!a}: {error.strerror}") from error
        print(f"{str(path)!a}: {len(content) / 1e6:,.1f} MB; {result}")


class Reference(NamedTuple):
    """Real images as an exported file takes them, and the predictions of the model itself."""

    inputs: list[Tensor]  # of one image each: (1, ...)
    batch: Tensor  # (BATCH, ...): the first images as squares; repeated if there are fewer
    probabilities: Tensor  # (count, classes) float32
    score: str  # the fraction of the images that are right, in words
    to_probabilities: Callable[[Tensor], Tensor]  # of logits
    is_raw: bool  # the inputs are normalized, and the file is to give logits


@torch.inference_mode()
def predict_with_model(trained: LoadedModel, source: Source, is_raw: bool) -> Reference:
    """Predict all images of `source` that can be read with the code of evaluation."""
    data, model, normalize = trained.config.data, trained.model, trained.normalize
    inputs, squares, probabilities, kept = [], [], [], []
    task = TASKS[source.task]
    for index in range(len(source)):
        try:
            pixels = source.read(index)
        except BadImageError:
            continue
        square = source.empty(1, data.eval_size)
        fit_square(pixels, square[0], data.fit, trained.mean)
        planes = square.permute(0, 3, 1, 2)
        if is_raw:
            given = crop = normalize(planes)
            logits = model(crop)
        else:
            given, crop = pixels[None], square
            logits = sum(weight * model(view) for view, weight in normalize.views(planes))
            logits = logits / trained.decision.temperature
        inputs.append(given)
        squares.append(crop)
        probabilities.append(task.probabilities(logits))
        kept.append(index)
    if not inputs:
        raise UserError("there are no images that can be read, to verify the files with")
    batch = torch.cat([squares[n % len(squares)] for n in range(BATCH)])
    shares, labels = torch.cat(probabilities), source.labels[kept]
    if source.is_multi_label:
        counted, right = counted_and_correct(
            trained.decision.has_label(shares).to(torch.int8), labels
        )
    else:
        counted, right = counted_and_correct(shares.argmax(1), labels)
    share = float(right.sum() / counted.sum())
    score = metric_text("exact" if source.is_multi_label else "top1", share)
    return Reference(inputs, batch, shares, score, task.probabilities, is_raw)


@torch.inference_mode()
def verify(predict: Predict, reference: Reference, tolerance: float) -> str:
    """Compare a file with the model, image by image and on a batch; returns the result in words.

    Raises:
        FaultError: if a probability differs by more than `tolerance`, or is not a number.
    """
    expected = reference.probabilities
    found = torch.cat([*map(predict, reference.inputs), predict(reference.batch)])
    found = reference.to_probabilities(found) if reference.is_raw else found
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
