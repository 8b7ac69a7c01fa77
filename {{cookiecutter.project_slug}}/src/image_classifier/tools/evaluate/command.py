"""`evaluate`: the scores of a trained model."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from ...config import ComputeConfig, RunConfig
from ...extensions import within
from ...runtime.command_line import command, naming_flags_of, parse, summary
from ...runtime.launch import run_in_processes


@dataclass(frozen=True)
class EvaluateOptions:
    """What to evaluate."""

    run: Annotated[str, tyro.conf.Positional]  # run folder, or a checkpoint in one
    split: Literal["val", "test", "train"] = "val"  # images to evaluate on
    root: str = ""  # folder of the images, if not the training folder. Folders of
    # classes without train, val and test are evaluated as a whole; some classes suffice
    batch_size: int = within(0, 0, 65536)  # images at once, of all processes; 0: as in training
    processes: int | Literal["auto"] = "auto"  # one per GPU by default
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto: an accelerator if there is one


def main(words: list[str]) -> int:
    """Evaluate the best weights of a run: `evaluate RUN [--split test]`."""
    options = parse(EvaluateOptions, words, prog=command("evaluate"), about=summary(main))
    compute = ComputeConfig(device=options.device)

    def work() -> None:
        from .evaluate import evaluate_run

        evaluate_run(options.run, options.split, options.root, compute, options.batch_size)

    with naming_flags_of(EvaluateOptions):
        return run_in_processes(work, RunConfig(processes=options.processes), compute)
