"""`predict`: labels for new images."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from ...config import ComputeConfig
from ...errors import EXIT_DONE, EXIT_FAULT
from ...extensions import within
from ...runtime.command_line import command, parse, summary
from ...runtime.launch import attempt

RESULT_IS_IN_FILES = "--out"


@dataclass(frozen=True)
class PredictOptions:
    """What to predict, and where to write the predictions."""

    run: Annotated[str, tyro.conf.Positional]  # run folder, or a checkpoint in one
    paths: Annotated[tuple[str, ...], tyro.conf.Positional]  # files, folders, 'patterns' such as
    # 'photos/**/*.jpg'; -: a list on standard input
    out: str = ""  # file to write, .csv or .jsonl; default: a table on the screen
    embeddings: str = ""  # file to write, .npy or .safetensors: a row of features for each
    # image: what the last layer gets
    top_k: int = within(5, 1, 65536)  # number of most probable classes to name for each image
    batch_size: int = within(256, 1, 65536)  # images per forward pass
    workers: int | Literal["auto"] = within("auto", 0, 4096)  # decoding processes
    tta: Literal["as-trained", "none", "flip", "shift"] = "as-trained"  # test-time augmentation:
    # views of each image whose predictions are averaged, as --augment.tta of training
    null: bool = False  # names in the list end with NUL, as `find -print0` writes them
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto: an accelerator if there is one
    explain: str = ""  # folder for heat maps (PNG), for up to 1,000 images: the places that
    # raise the score of the predicted class
    fresh: bool = False  # start over, and replace --out and --embeddings


def main(words: list[str]) -> int:
    """Label images with a trained model: `predict RUN PATH... [--out FILE.csv]`."""
    options = parse(PredictOptions, words, prog=command("predict"), about=summary(main))
    compute = ComputeConfig(device=options.device)
    num_read = 0

    def work() -> None:
        nonlocal num_read
        from .predict import predict

        num_read = predict(options, compute)

    return attempt(work) or (EXIT_DONE if num_read else EXIT_FAULT)
