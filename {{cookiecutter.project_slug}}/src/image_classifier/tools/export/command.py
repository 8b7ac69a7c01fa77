"""`export`: a trained model for other programs."""

import sys
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from ...config import EXIT_INTERRUPTED, ComputeConfig, RunConfig, UserError
from ...runtime.command_line import check_ranges, command, parse, summary
from ...runtime.launch import run_in_processes


@dataclass(frozen=True)
class ExportOptions:
    """What to export, and how it is checked."""

    run: Annotated[str, tyro.conf.Positional]  # run folder, or a checkpoint in one
    format: tuple[Literal["onnx", "pt2", "safetensors"], ...] = ("onnx", "pt2", "safetensors")
    # files to write, as `model.<format>`
    out: str = ""  # folder to write them to; default: `export` in the run folder
    raw: bool = False  # normalised float images to logits, in place of pixels to probabilities
    int8: bool = False  # the ONNX file in 8 bits too, if its top-1 stays within 0.5 points
    tolerance: float = 1e-3  # largest difference of a probability to the model's
    split: Literal["val", "test", "train"] = "val"  # whose images are compared
    images: int = 256  # how many of them
    root: str = ""  # folder of the images, where it is not the one of the training


def main(words: list[str]) -> int:
    """Write a trained model for other programs: `export RUN [--format onnx pt2 safetensors]`."""
    options = parse(ExportOptions, words, prog=command("export"), about=summary(main))
    if not options.format:
        raise UserError("--format needs one or more of: onnx, pt2, safetensors")
    if options.int8 and "onnx" not in options.format:
        raise UserError("--int8 is made of the ONNX file: it needs --format onnx")
    check_ranges(options, tolerance=(0, 1), images=(1, 10**9))

    def work() -> None:
        from .export import Wanted, export

        wanted = Wanted(
            formats=tuple(dict.fromkeys(options.format)),
            folder=options.out,
            is_raw=options.raw,
            tolerance=options.tolerance,
            split=options.split,
            root=options.root,
            num_images=options.images,
            has_int8=options.int8,
        )
        export(options.run, wanted)

    try:
        return run_in_processes(work, RunConfig(processes=1), ComputeConfig(device="cpu"))
    except KeyboardInterrupt:
        print("\ninterrupted: what has been named is whole, the rest is not there", file=sys.stderr)
        return EXIT_INTERRUPTED
