"""`export`: a trained model as a file for other programs."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from ...config import ComputeConfig, RunConfig
from ...runtime.command_line import check_ranges, command, parse, summary
from ...runtime.launch import run_in_processes


@dataclass(frozen=True)
class ExportOptions:
    """What to export, and how the files are verified."""

    run: Annotated[str, tyro.conf.Positional]  # run folder, or a checkpoint in one
    format: tuple[Literal["onnx", "pt2", "safetensors"], ...] = ("onnx", "pt2", "safetensors")
    # files to write, as `model.<format>`
    out: str = ""  # folder to write them to; default: `export` in the run folder
    raw: bool = False  # normalised float images to logits, in place of pixels to probabilities
    tolerance: float = 1e-3  # largest difference from a probability of the model
    split: Literal["val", "test", "train"] = "val"  # images to verify with
    images: int = 256  # number of images to verify with
    root: str = ""  # folder of these images, if not the one of the training


def main(words: list[str]) -> int:
    """Write a trained model for other programs: `export RUN [--format onnx pt2 safetensors]`."""
    options = parse(ExportOptions, words, prog=command("export"), about=summary(main))
    check_ranges(options, tolerance=(0, 1), images=(1, 10**9))

    def work() -> None:
        from .export import export

        export(options)

    return run_in_processes(work, RunConfig(processes=1), ComputeConfig(device="cpu"))
