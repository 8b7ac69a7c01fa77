"""A trained model to files that need this package no more, each compared with the model first."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from ...config import FREE_TO_CHANGE, ComputeConfig, Config, FaultError, UserError, flatten
from ...runtime.distributed import join_world
from ...runtime.files import lock_file, remove_leftovers, write_text, write_whole
from ...trained import Trained, open_trained
from .agreement import RealImages, ask, compare, compare_scores, open_images
from .formats import FORMATS, Portable, check_libraries, example, int8, open_onnx
from .pixels import FromNormalised, FromPixels

SCRATCH = ".export-"  # what folders begin with in which files are made
CALIBRATED = 256  # training images that say which range the numbers of 8 bits are to have


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
    has_int8: bool = False  # the ONNX file in 8 bits, too


def export(run: str, wanted: Wanted) -> None:
    """Write the best weights of the run folder (or checkpoint) `run` in each wanted format.

    Raises:
        UserError: if there is no such run, its images are not to be had, or a library is missing.
        FaultError: if a file answers otherwise than the model, or no graph can be made of that.
    """
    if "onnx" in wanted.formats:
        check_libraries()
    # In float32 as it is: an accelerator, and some processors, would round on the way. And in the
    # usual layout: the one for training is no business of a file's.
    compute = ComputeConfig(device="cpu", tf32=False, channels_last=False)
    with join_world(compute) as world:
        trained = open_trained(run, compute, world)
    images = open_images(trained, wanted.split, wanted.root, wanted.is_raw)
    with own_folder(run, wanted.folder) as folder:
        reference = ask(images.thinned(wanted.num_images))
        print(
            f"weights of step {trained.step} from {str(trained.path)!a}, in float32: top-1 "
            f"{reference.top1:.2%} of {len(reference.taken):,} {wanted.split} images"
        )
        network = portable(trained, images)
        for name in wanted.formats:
            with placed(folder, f"model.{name}") as path:
                account = compare(FORMATS[name](network, path), reference, wanted.tolerance)
            say(folder, f"model.{name}", account)
            if program := example(name, wanted.is_raw):
                write_text(folder / f"example_{name}.py", program)
        if wanted.has_int8:
            examples = open_images(trained, "train", wanted.root, wanted.is_raw)
            write_int8(folder, examples.thinned(CALIBRATED), images)


def write_int8(folder: Path, examples: RealImages, images: RealImages) -> None:
    """Write the ONNX file in `folder` once more in 8 bits, if it is then about as often right.

    Raises:
        FaultError: if it is not.
    """
    graph, name = folder / "model.onnx", "model.int8.onnx"
    with placed(folder, name) as path:
        taken = (examples.taken(pixels) for pixels, _ in examples)
        account = compare_scores(int8(graph, path, taken), open_onnx(graph), images)
    say(folder, name, account)


@contextmanager
def placed(folder: Path, name: str) -> Iterator[Path]:
    """A block that writes to a path beside `name` in `folder`, and keeps it if all is well.

    Raises:
        FaultError: if it can't be written.
    """
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=SCRATCH) as scratch:
            path = Path(scratch, name)
            yield path
            with path.open("rb") as file:
                write_whole(folder / name, lambda copy: shutil.copyfileobj(file, copy))
    except OSError as error:
        raise FaultError(f"cannot write to {str(folder)!a}: {error.strerror or error}") from error


def say(folder: Path, name: str, account: str) -> None:
    """Print a line on a file that is there now."""
    path = folder / name
    print(f"{str(path)!a}: {path.stat().st_size / 1e6:,.1f} MB; {account}")


@contextmanager
def own_folder(run: str, name: str) -> Iterator[Path]:
    """A block with the folder to write to, made if need be, where no other export is at work.

    Raises:
        UserError: if it can't be made, or another export is at work there.
    """
    path = Path(run)
    folder = Path(name) if name else (path if path.is_dir() else path.parent) / "export"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise UserError(
            f"cannot write to {str(folder)!a}: {error.strerror}; set --out to another folder"
        ) from error
    try:
        if lock_file(descriptor, f"{str(folder)!a} is being exported to by another process"):
            remove_leftovers(folder, "model.*")
            for left in folder.glob(f"{SCRATCH}*"):
                shutil.rmtree(left, ignore_errors=True)
        yield folder
    finally:
        os.close(descriptor)


def portable(trained: Trained, seen: RealImages) -> Portable:
    """The model for images like `seen`, with what a file says of it: nothing of this machine."""
    side, config = seen.side, trained.config
    if seen.is_raw:
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
