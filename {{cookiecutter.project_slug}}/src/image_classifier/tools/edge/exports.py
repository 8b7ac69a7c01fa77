"""The options of this tool for the command `export`, and what it then writes."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ...errors import UserError
from ...extensions import within
from ...runtime.platform import install_command
from ..export.command import ExportOptions

if TYPE_CHECKING:
    from ...checkpoints import LoadedModel
    from ..export.export import Reference
    from .variants import Files

LIBRARIES = ("onnx", "onnxruntime", "onnxscript", "openvino")  # OpenVINO reads the ONNX graph


@dataclass(frozen=True)
class EdgeOptions(ExportOptions):
    """What to export, in which precisions, and how the files are verified."""

    format: tuple[Literal["onnx", "pt2", "safetensors", "openvino"], ...] = (
        "onnx",
        "pt2",
        "safetensors",
    )
    # files to write, as `model.<format>`; openvino: model.xml and model.bin
    precision: tuple[Literal["fp16", "int8"], ...] = ()  # to write as well, beside float32, of
    # onnx and openvino: `model.int8.onnx` and so on
    calibration_images: int = within(128, 1)  # training images that set the ranges of int8
    symmetric: bool = False  # int8 activations around 0, which TensorRT needs; CPUs are slower
    agreement: float = within(0.95, 0, 1)  # smallest share of images for which a file of
    # --precision answers as the model does

    def __post_init__(self) -> None:
        """Check that all that is asked for can be written.

        Raises:
            UserError: if not.
        """
        if self.precision and not {"onnx", "openvino"} & {*self.format}:
            raise UserError("--precision is for --format onnx and openvino, not for the others")
        if self.symmetric and "int8" not in self.precision:
            raise UserError("--symmetric needs --precision int8")
        missing = [name for name in LIBRARIES if find_spec(name) is None]
        if missing and "openvino" in self.format:
            install = install_command(*LIBRARIES)
            raise UserError(f"--format openvino needs {', '.join(missing)}: {install}")


def add_options(_: type[ExportOptions]) -> type[ExportOptions]:
    """The options of `export`, with those of this tool."""
    return EdgeOptions


def export_more(
    options: EdgeOptions,
    trained: "LoadedModel",
    reference: "Reference",
    folder: Path,
    files: "Files",
) -> None:
    """Write what `options` ask for beside `files`, and compare all; see `edge.py`."""
    from .edge import write_variants

    if options.precision or "openvino" in options.format:
        write_variants(options, trained, reference, folder, files)
