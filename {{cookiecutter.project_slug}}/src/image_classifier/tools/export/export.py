"""Write a trained model as files that do not need this package, each verified against the model."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ...config import ComputeConfig, FaultError, UserError
from ...runtime.distributed import join_world
from ...runtime.files import lock_file, sync_folder
from ...trained import open_trained
from .command import ExportOptions
from .export_graph import ExportModule
from .formats import FORMATS, check_libraries
from .verify_export import open_images, predict_with_model, verify

SCRATCH = ".unfinished"  # folder in the output folder for files that are not verified yet


def export(options: ExportOptions) -> None:
    """Write the best weights of `options.run` in each format of `options.format`.

    Raises:
        UserError: if there is no such run, its images cannot be read, or a library is missing.
        FaultError: if a file predicts otherwise than the model, or the model makes no graph.
    """
    if "onnx" in options.format:
        check_libraries()
    # Plain float32 on the CPU, in the usual memory format: channels_last is for training only.
    compute = ComputeConfig(device="cpu", channels_last=False)
    with join_world(compute) as world:
        trained = open_trained(options.run, compute, world)
    torch.set_float32_matmul_precision("highest")  # some processors round on the way otherwise
    source = open_images(trained, options.split, options.root)
    run = Path(options.run)
    default = (run if run.is_dir() else run.parent) / "export"
    with output_folder(Path(options.out or default)) as folder:
        source = source.thinned(min(options.images, len(source)))
        reference = predict_with_model(trained, source, options.raw)
        print(
            f"weights of step {trained.step} from {str(trained.path)!a}, in float32: top-1 "
            f"{reference.top1:.2%} of {len(reference.inputs):,} {options.split} images"
        )
        module = ExportModule(trained, options.raw).eval().requires_grad_(False)
        for name in dict.fromkeys(options.format):
            path, scratch = folder / f"model.{name}", folder / SCRATCH / f"model.{name}"
            try:
                result = verify(FORMATS[name](module, scratch), reference, options.tolerance)
                with scratch.open("rb") as file:
                    os.fsync(file.fileno())  # the data before the name
                scratch.replace(path)
                sync_folder(folder)
            except OSError as error:
                reason = error.strerror or error
                raise FaultError(f"cannot write to {str(folder)!a}: {reason}") from error
            print(f"{str(path)!a}: {path.stat().st_size / 1e6:,.1f} MB; {result}")


@contextmanager
def output_folder(folder: Path) -> Iterator[Path]:
    """A block that has `folder` to itself, made if needed, with the folder `SCRATCH` in it.

    Raises:
        UserError: if it cannot be written, or another export writes to it.
    """
    try:
        (folder / SCRATCH).mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise UserError(
            f"cannot write to {str(folder)!a}: {error.strerror}; set --out to another folder"
        ) from error
    try:
        lock_file(descriptor, f"{str(folder)!a} is in use by another export")
        try:
            yield folder
        finally:
            shutil.rmtree(folder / SCRATCH, ignore_errors=True)
    finally:
        os.close(descriptor)
