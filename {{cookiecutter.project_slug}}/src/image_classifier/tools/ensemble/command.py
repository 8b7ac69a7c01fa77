"""`ensemble`: several runs as one model."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from ...config import ComputeConfig
from ...runtime.command_line import command, naming_flags_of, parse, summary
from ...runtime.launch import attempt

RESULT_IS_IN_FILES = True


@dataclass(frozen=True)
class EnsembleOptions:
    """Which runs, and what of them is averaged."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional]  # run folders, or checkpoints in them; a
    # folder of `cross-validate` or `repeat` stands for all of its runs
    dir: str = "runs/ensemble"  # run folder to write, which is new
    average: Literal["probabilities", "weights"] = "probabilities"  # what to average.
    # probabilities: all networks are kept; weights: one network, of runs that began with the same
    # pretrained weights, if it is better on their validation images than each of them:
    # https://arxiv.org/abs/2203.05482
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # that compares averaged weights; auto:
    # an accelerator if there is one


def main(words: list[str]) -> int:
    """Make one model of several runs: `ensemble RUN RUN... [--dir FOLDER]`."""
    options = parse(EnsembleOptions, words, prog=command("ensemble"), about=summary(main))
    compute = ComputeConfig(device=options.device)

    def work() -> None:
        from .ensemble import ensemble

        with naming_flags_of(EnsembleOptions):
            ensemble(options, compute)

    return attempt(work)
