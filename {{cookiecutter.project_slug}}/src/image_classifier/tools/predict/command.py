"""`predict`: labels for new images."""

import os
import sys
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from ...config import EXIT_DONE, EXIT_FAULT, EXIT_INTERRUPTED, ComputeConfig, RunConfig
from ...runtime.command_line import check_ranges, command, parse, summary
from ...runtime.launch import run_in_processes


@dataclass(frozen=True)
class PredictOptions:
    """What to label, and where the answers go."""

    run: Annotated[str, tyro.conf.Positional]  # run folder, or a checkpoint in one
    paths: Annotated[tuple[str, ...], tyro.conf.Positional]  # files, folders, 'patterns' such as
    # 'photos/**/*.jpg'; -: a list on standard input
    out: str = ""  # file to write to, .csv, .jsonl or .parquet; default: a table on the screen
    top_k: int = 5  # most probable classes to name of each image
    batch_size: int = 256  # images that are computed at once
    workers: int | Literal["auto"] = "auto"  # decoding processes
    tta: Literal["as-trained", "none", "flip", "shift"] = "as-trained"  # views of each image whose
    # answers are averaged, as --augment.tta of training
    null: bool = False  # the list has NUL behind each name, as `find -print0` writes it
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto: an accelerator if there is one
    fresh: bool = False  # replace what is there: --out, or a part of it


def main(words: list[str]) -> int:
    """Label images with a trained model: `predict RUN PATH... [--out FILE.csv]`."""
    options = parse(PredictOptions, words, prog=command("predict"), about=summary(main))
    check_ranges(options, top_k=(1, 2**16), batch_size=(1, 2**16), workers=(0, 2**16))
    compute, num_read = ComputeConfig(device=options.device), 0

    def work() -> None:
        nonlocal num_read
        from .predict import predict

        num_read = predict(
            options.run,
            options.paths,
            options.out,
            top_k=options.top_k,
            batch_size=options.batch_size,
            workers=options.workers,
            tta=options.tta,
            separator=b"\0" if options.null else b"\n",
            fresh=options.fresh,
            compute=compute,
        )

    try:
        code = run_in_processes(work, RunConfig(processes=1), compute)
    except KeyboardInterrupt:
        partial = f"{options.out}.partial"
        kept = f"{partial!a} is kept, the same command (without --fresh) goes on"
        done = kept if options.out and os.path.exists(partial) else "nothing was written"
        print(f"\ninterrupted: {done}", file=sys.stderr)
        return EXIT_INTERRUPTED
    return code or (EXIT_DONE if num_read else EXIT_FAULT)
