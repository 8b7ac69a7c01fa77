"""Write a trained model as files that do not need this package, each verified against the model."""

from pathlib import Path

import torch

from ...config import ComputeConfig
from ...errors import FaultError, UserError
from ...evaluate import load_model
from ...runtime.distributed import join_world
from ...runtime.files import remove_leftovers, write_whole
from .command import ExportOptions
from .export_graph import ExportModule
from .formats import FORMATS, check_libraries
from .verify_export import open_images, predict_with_model, verify


def export(options: ExportOptions) -> None:
    """Write the best weights of `options.run` in each format of `options.format`.

    Raises:
        UserError: if there is no such run, its images cannot be read, or a library is missing.
        FaultError: if a file cannot be written or predicts otherwise than the model, or torch makes
            no graph of the model.
    """
    if "onnx" in options.format:
        check_libraries()
    # Plain float32 on the CPU, in the usual memory format: channels_last is for training only.
    compute = ComputeConfig(device="cpu", channels_last=False)
    with join_world(compute) as world:
        trained = load_model(options.run, compute, world)
    torch.set_float32_matmul_precision("highest")  # some processors round on the way otherwise
    source = open_images(trained, options.split, options.root)
    run = Path(options.run)
    folder = Path(options.out or (run if run.is_dir() else run.parent) / "export")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder, "model.*")
    except OSError as error:
        raise UserError(
            f"cannot write to {str(folder)!a}: {error.strerror}; set --out to another folder"
        ) from error
    source = source.thinned(min(options.images, len(source)))
    reference = predict_with_model(trained, source, options.raw)
    print(
        f"weights of step {trained.step} from {str(trained.path)!a}, in float32: top-1 "
        f"{reference.top1:.2%} of {len(reference.inputs):,} {options.split} images"
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
