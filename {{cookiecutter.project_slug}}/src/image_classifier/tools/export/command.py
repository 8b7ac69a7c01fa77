"""`export`: a trained model as a file for other programs."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from ...errors import UserError
from ...extensions import chained, within
from ...runtime.command_line import command, naming_flags_of, parse, summary
from ...runtime.launch import attempt

RESULT_IS_IN_FILES = True


@dataclass(frozen=True)
class ExportOptions:
    """What to export, and how the files are verified."""

    run: Annotated[str, tyro.conf.Positional]  # run folder, or a checkpoint in one
    format: tuple[Literal["onnx", "pt2", "safetensors"], ...] = ("onnx", "pt2", "safetensors")
    # files to write, as `model.<format>`
    out: str = ""  # folder to write them to; default: `export` in the run folder
    raw: bool = False  # normalized float images to logits, in place of pixels to probabilities
    tolerance: float = within(1e-3, 0, 1)  # largest difference from the model's probabilities
    split: Literal["val", "test", "train"] = "val"  # images to verify with
    images: int = within(256, 1)  # number of images to verify with
    root: str = ""  # folder of these images, if not the training folder


def main(words: list[str]) -> int:
    """Write a trained model for other programs: `export RUN [--format onnx pt2 safetensors]`."""
    kind = chained("exports", "add_options", ExportOptions)
    options = parse(kind, words, prog=command("export"), about=summary(main))
    if not options.format:
        raise UserError("--format needs one or more names, such as onnx")

    def work() -> None:
        from .export import export

        with naming_flags_of(kind):
            export(options)

    return attempt(work)
