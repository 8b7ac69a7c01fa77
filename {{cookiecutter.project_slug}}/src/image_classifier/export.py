"""A trained model to files that need this package no more, each compared with the model first."""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from .config import (
    FREE_TO_CHANGE,
    ComputeConfig,
    Config,
    DataConfig,
    FaultError,
    UserError,
    flatten,
)
from .datasets import open_dataset
from .datasets.source import Source
from .decode import BadImageError, centre_crop, pixels_to_keep
from .distributed import join_world
from .formats import FORMATS, Answer, Portable, check_libraries, example
from .mistakes import check_labels, some
from .pixels import FromNormalised, FromPixels
from .run import write_text, write_whole
from .trained import Trained, open_trained

TOGETHER = (1, 2, 7)  # images in the batches that are tried


@dataclass(frozen=True)
class Wanted:
    """What to export, and with which images it is compared."""

    formats: tuple[str, ...] = ("onnx", "pt2", "safetensors")
    folder: str = ""  # to write to; empty: `export` in the run folder, or beside the checkpoint
    is_raw: bool = False  # normalised images to logits, not pixels to probabilities
    tolerance: float = 1e-3  # largest difference of two probabilities
    split: str = "val"
    root: str = ""  # of the images; empty: where they were in training
    num_images: int = 256


@dataclass(frozen=True)
class Reference:
    """Real images, and what the model itself says of them."""

    images: list[Tensor]  # (1, ...) each, as the export takes them
    squares: Tensor  # (7, ...), the first of them cut to one size
    probabilities: Tensor  # (count, classes)
    top1: float  # share of the images whose most probable class is right


def export(run: str, wanted: Wanted) -> None:
    """Write the best weights of the run folder (or checkpoint) `run` in each wanted format.

    Raises:
        UserError: if there is no such run, its images are not to be had, or a library is missing.
        FaultError: if a file answers otherwise than the model, or no graph can be made of that.
    """
    if "onnx" in wanted.formats:
        check_libraries()
    # In float32 as it is: an accelerator, and some processors, would round on the way.
    compute = ComputeConfig(device="cpu", tf32=False)
    with join_world(compute) as world:
        trained = open_trained(run, compute, world)
        folder = open_folder(run, wanted.folder)
        reference = look(trained, wanted)
        print(
            f"weights of step {trained.step} from {str(trained.path)!a}, in float32: "
            f"top-1 {reference.top1:.2%} of {len(reference.images):,} {wanted.split} images"
        )
        network = portable(trained, wanted.is_raw)
        for name in wanted.formats:
            write(name, network, reference, folder, wanted.tolerance)


def open_folder(run: str, name: str) -> Path:
    """The folder to write to, made if need be.

    Raises:
        UserError: if it can't be.
    """
    path = Path(run)
    folder = Path(name) if name else (path if path.is_dir() else path.parent) / "export"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot write to {str(folder)!a}: {error.strerror}; set --out to another folder"
        ) from error
    return folder


@torch.inference_mode()
def look(trained: Trained, wanted: Wanted) -> Reference:
    """Let the model see images of a split, spread evenly over it, as evaluation does.

    Raises:
        UserError: if they are not to be had, or are of other classes.
    """
    data = trained.config.data
    data = replace(data, root=wanted.root or data.root)
    source = open_dataset(data, wanted.split)
    if source.classes != trained.classes:
        raise UserError(
            f"{str(trained.path)!a} knows the classes {some(trained.classes)}, which are "
            f"not those of the images: {some(source.classes)}"
        )
    check_labels(source, wanted.split)
    source = source.thinned(min(wanted.num_images, len(source)))
    images, squares, answers, right = [], [], [], 0
    for pixels, label in readable(source, data):
        square = torch.empty((1, side_of(trained), side_of(trained), 3), dtype=torch.uint8)
        centre_crop(pixels, square[0])
        planes = square.permute(0, 3, 1, 2)
        if wanted.is_raw:
            square = trained.normalize(planes)
            logits = trained.model(square)
        else:
            views = trained.normalize.views(planes)
            logits = torch.stack([weight * trained.model(view) for view, weight in views]).sum(0)
        images.append(square if wanted.is_raw else pixels[None])
        squares.append(square)
        answers.append(logits.softmax(1))
        right += int(logits.argmax()) == label
    if not images:
        raise UserError(f"{wanted.split}: there are no images that can be read")
    few = [squares[number % len(squares)] for number in range(max(TOGETHER))]
    return Reference(images, torch.cat(few), torch.cat(answers), right / len(images))


def readable(source: Source, data: DataConfig) -> Iterator[tuple[Tensor, int]]:
    """The pixels of each image, (height, width, 3) uint8, and its label; bad ones as in training.

    Raises:
        UserError: if one can't be read and such are not to be skipped.
    """
    keep = pixels_to_keep(data, data.eval_size)
    for number, label in enumerate(source.labels.tolist()):
        try:
            yield source.read(number, keep), label
        except BadImageError:
            if data.on_bad_image == "stop":
                raise


def side_of(trained: Trained) -> int:
    """The side of the square that the model sees in evaluation, in pixels."""
    return trained.config.data.eval_size


def portable(trained: Trained, is_raw: bool) -> Portable:
    """The model as it is exported, with what a file says of it: nothing of this machine."""
    side, config = side_of(trained), trained.config
    if is_raw:
        network = FromNormalised(trained.model)
        images = f"(batch, 3, {side}, {side}) float32: (red, green and blue / 255 - mean) / std"
        answers = "(batch, classes) float32: logits"
    else:
        tta = trained.normalize.tta
        network = FromPixels(trained.model, side, trained.mean, trained.std, tta)
        images = "(batch, height, width, 3) uint8: red, green and blue, of any size"
        answers = "(batch, classes) float32: probabilities"
    about = {
        "classes": list(trained.classes),
        "images": images,
        "answers": answers,
        "side": side,
        "mean": list(trained.mean),
        "std": list(trained.std),
        "model": asdict(config.model),
        "step": trained.step,
        "config": digest(config),
    }
    return Portable(network.eval().requires_grad_(False), about)


def digest(config: Config) -> str:
    """A short name for all that decides what is learned: another run has the same only if equal."""
    knobs = {k: v for k, v in flatten(config).items() if not k.startswith(FREE_TO_CHANGE)}
    return hashlib.blake2b(json.dumps(knobs).encode(), digest_size=8).hexdigest()


def write(
    name: str, network: Portable, reference: Reference, folder: Path, tolerance: float
) -> None:
    """Write the file of format `name`, which has its name once it answers as the model does.

    Raises:
        FaultError: if it does not, or can't be written.
    """
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".export-") as scratch:
            path = Path(scratch, f"model.{name}")
            compared = compare(FORMATS[name](network, path), reference, network.is_raw, tolerance)
            size = path.stat().st_size
            with path.open("rb") as file:
                write_whole(folder / path.name, lambda copy: shutil.copyfileobj(file, copy))
        if program := example(name, network.is_raw):
            write_text(folder / f"example_{name}.py", program)
    except OSError as error:
        raise FaultError(f"cannot write to {str(folder)!a}: {error.strerror or error}") from error
    print(f"{str(folder / path.name)!a}: {size / 1e6:,.1f} MB; {compared}")


@torch.inference_mode()
def compare(answer: Answer, reference: Reference, is_raw: bool, tolerance: float) -> str:
    """What to say of a file that answers as the model does, to one image and to several at once.

    Raises:
        FaultError: if it answers otherwise.
    """

    def probabilities(images: Tensor) -> Tensor:
        return answer(images).softmax(1) if is_raw else answer(images)

    expected = reference.probabilities
    found = torch.cat([probabilities(image) for image in reference.images])
    largest = (found - expected).abs().max()
    for count in TOGETHER:
        together = probabilities(reference.squares[:count])
        numbers = torch.arange(count) % len(expected)
        largest = torch.maximum(largest, (together - expected[numbers]).abs().max())
    agreeing = int((found.argmax(1) == expected.argmax(1)).sum())
    account = (
        f"probabilities within {largest.item():.1e} of the model's, the same class for "
        f"{agreeing:,} of {len(expected):,} images"
    )
    if not largest <= tolerance:  # nor where it is not a number
        raise FaultError(
            f"not written, as it answers otherwise: {account}; --tolerance {tolerance:g}"
        )
    return account
