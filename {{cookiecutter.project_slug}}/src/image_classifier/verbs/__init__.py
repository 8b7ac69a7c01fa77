"""Verbs by name. To add one: a file with its options and its function, and its name in `VERBS`.

The options are a frozen dataclass, whose comments are the `--help`; the function takes the words
behind the verb and returns the exit code. What it does is imported when its words are understood.
"""

from collections.abc import Callable

from .bench import bench_verb
from .check import check_verb
from .compare import compare_verb
from .evaluate import evaluate_verb
from .export import export_verb
from .find_lr import find_lr_verb
from .predict import predict_verb
from .prepare import prepare_verb
from .train import train_verb

VERBS: dict[str, Callable[[list[str]], int]] = {
    "train": train_verb,
    "evaluate": evaluate_verb,
    "predict": predict_verb,
    "export": export_verb,
    "check": check_verb,
    "prepare": prepare_verb,
    "bench": bench_verb,
    "find-lr": find_lr_verb,
    "compare": compare_verb,
}
