"""Writes the files of fewer bits and of other runtimes, and compares all in a table."""

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from ...checkpoints import LoadedModel
from ...errors import FaultError
from ...runtime.files import write_whole
from ..export.export import Reference, replacing, verify
from ..export.export_graph import ExportModule
from ..export.formats import FORMATS, Predict
from ..statistics.statistics import Mean, by_images
from .exports import EdgeOptions
from .variants import Files, half_onnx, int8_onnx, onnx_predict, openvino

BATCH = 32  # images in the batches that are timed
ROUNDS, SECONDS = 5, 0.2  # of timing: each file has its turn in each round
ALIKE = 0.05  # by so much a probability may differ between an image alone and in a batch


class Comparison(NamedTuple):
    """How a file answers the images, beside the model."""

    same: int  # images with the answer of the model
    count: int
    accuracy: float  # top-1; of several labels, the share of images with all of them right
    change: Mean  # of the accuracy
    batch: float  # largest difference of a probability between an image alone and in a batch

    def __str__(self) -> str:
        """It in words."""
        return (
            f"the same answer for {self.same:,} of {self.count:,} images, "
            f"accuracy {self.accuracy:.2%} ({self.change_text})"
        )

    @property
    def change_text(self) -> str:
        """The change of the accuracy, and half of its interval."""
        reach = (self.change.high - self.change.low) / 2
        return f"{self.change.mean:+.1%} ± {reach:.1%}"


class Row(NamedTuple):
    """A file in the table."""

    name: str
    size: int  # bytes
    predict: Predict
    comparison: Comparison


def write_variants(
    options: EdgeOptions, trained: LoadedModel, reference: Reference, folder: Path, files: Files
) -> None:
    """Write each file that agrees with the model, and print a table of these and of `files`.

    Raises:
        FaultError: if one does not agree, or cannot be written.
    """
    module = ExportModule(trained, options.raw).eval().requires_grad_(False)
    exact = files.get("onnx") or FORMATS["onnx"](module)
    rows = [
        Row(f"model.{name}", len(content), predict, compare(predict, reference))
        for name, (content, predict) in files.items()
    ]
    for contents, predict in variants(options, trained, module, exact):
        *_, name = contents
        found = compare(predict, reference)
        result = str(found)
        with replacing(*(folder / part for part in contents)):
            if name == "model.xml":
                result = verify(predict, module, reference, options.tolerance)
            elif not (found.same >= options.agreement * found.count and found.batch <= ALIKE):
                raise FaultError(
                    f"{name} is not written: {found}, probabilities within {found.batch:.1e} of "
                    f"those in a batch; --agreement {options.agreement:g}"
                )
        write_parts(contents, folder)
        size = sum(map(len, contents.values()))
        print(f"{str(folder / name)!a}: {size / 1e6:,.1f} MB; {result}")
        rows.append(Row(name, size, predict, found))
    print_table(rows, reference)


def write_parts(contents: dict[str, bytes], folder: Path) -> None:
    """Write files of which each needs those before it, and is there only beside its own.

    Raises:
        FaultError: if one cannot be written.
    """
    path = folder
    try:
        for name in [*contents][1:]:
            path = folder / name
            path.unlink(missing_ok=True)  # it may be of other weights than those that are written
        for name, content in contents.items():
            path = folder / name
            write_whole(path, lambda file, content=content: file.write(content))
    except OSError as error:
        raise FaultError(f"cannot write {str(path)!a}: {error.strerror}") from error


def variants(
    options: EdgeOptions, trained: LoadedModel, module: ExportModule, exact: tuple[bytes, Predict]
) -> Iterator[tuple[dict[str, bytes], Predict]]:
    """The contents of each file beside those of `export`, by name, and what predicts from them."""
    if "openvino" in options.format:
        yield openvino(exact[0], module, "model")
    for precision in dict.fromkeys(options.precision):
        if precision == "fp16":
            content = half_onnx(trained, options.raw)
        else:
            content = int8_onnx(exact[0], trained, options)
        stem = f"model.{precision}"
        if "onnx" in options.format:
            yield {f"{stem}.onnx": content}, onnx_predict(content)
        if "openvino" in options.format:
            yield openvino(content, module, stem)


@torch.inference_mode()
def compare(predict: Predict, reference: Reference) -> Comparison:
    """Compare the answers of a file with those of the model, and with the labels."""
    found = torch.cat([reference.to_probabilities(predict(one)) for one in reference.inputs])
    count = len(found)
    wanted = reference.to_answers(reference.probabilities)
    is_same = (reference.to_answers(found) == wanted).flatten(1).all(1)
    is_same &= found.isfinite().all(1)  # what is not a number is no answer
    counted, right = reference.counted_and_correct(found)
    _, was_right = reference.counted_and_correct(reference.probabilities)
    lost = int((was_right & ~right).sum())
    gained = int((right & ~was_right).sum())
    in_batch = reference.to_probabilities(predict(reference.batch))
    alone = found[torch.arange(len(in_batch)) % count]
    return Comparison(
        int(is_same.sum()),
        count,
        float(right.sum() / counted.sum()),
        by_images(lost, gained, max(1, int(counted.sum()))),
        float((in_batch - alone).abs().max()),
    )


def print_table(rows: list[Row], reference: Reference) -> None:
    """Print size, accuracy and speed of each file; speeds are medians, measured in turns."""
    squares = reference.squares
    batch = torch.cat([squares[number % len(squares)] for number in range(BATCH)])
    speeds = [([], []) for _ in rows]
    for _ in range(ROUNDS):
        for row, found in zip(rows, speeds, strict=True):
            for rates, images in zip(found, (squares[0], batch), strict=True):
                rates.append(images_per_second(row.predict, images))
    width = max(len(row.name) for row in rows)
    print(
        f"\n{'file':<{width}}  {'MB':>7}  accuracy        change  same answer  "
        f"images/s: 1  {BATCH:>7}"
    )
    for row, (alone, together) in zip(rows, speeds, strict=True):
        found = row.comparison
        print(
            f"{row.name:<{width}}  {row.size / 1e6:>7,.1f}  {found.accuracy:>8.2%}  "
            f"{found.change_text}  {found.same:>5,}/{found.count:<5,}  "
            f"{median(alone):>11,.1f}  {median(together):>7,.1f}"
        )


@torch.inference_mode()
def images_per_second(predict: Predict, images: torch.Tensor) -> float:
    """How fast a file predicts `images`, after one call to warm up."""
    predict(images)
    start = time.perf_counter()
    calls = 0
    while (seconds := time.perf_counter() - start) < SECONDS or not calls:
        predict(images)
        calls += 1
    return calls * len(images) / seconds
