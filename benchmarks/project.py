# ruff: noqa: PLC0415 - a contender's process imports what that contender needs, and nothing else
"""The generated project in a comparison: its config names every knob.

So neither a new default nor a change of a preset changes what is measured: a knob that is missing
here is an error. Here everything is off that can be off; a comparison names what it needs.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

SECTIONS: dict[str, dict[str, Any]] = {
    "data": {
        "name": "folder",
        "root": "",
        "labels": "",
        "columns": (),
        "val_fraction": 0.2,
        "fold": 0,
        "cache": "",
        "limit": 0,
        "channels": 3,
        "bits": 8,
        "fit": "crop",
        "image_size": 224,
        "test_size": 0,
        "batch_size": 64,
        "where": "auto",
        "workers": "auto",
        "prefetch_batches": 4,
        "on_bad_image": "stop",
        "balance": "none",
        "groups": "",
        "test_fraction": 0.0,
    },
    "augment": {
        "crop": "none",
        "min_scale": 1.0,
        "flip": "none",
        "policy": "none",
        "cutout": 0,
        "mixup": 0.0,
        "cutmix": 0.0,
        "min_size": 0,
        "tta": "none",
        "vertical_flip": False,
        "turns": False,
        "jitter": 0.0,
        "grayscale": 0.0,
        "blur": 0.0,
    },
    "model": {
        "name": "resnet18",
        "width": 64,
        "dropout": 0.0,
        "drop_path": 0.0,
        "head": "last",
        "task": "single-label",
        "lora_rank": 0,
        "members": 1,
    },
    "optim": {
        "name": "sgd",
        "lr": 0.02,
        "momentum": 0.9,
        "weight_decay": 1e-4,
        "loss": "entropy",
        "schedule": "constant",
        "warmup_epochs": 0.0,
        "label_smoothing": 0.0,
        "clip_norm": 0.0,
        "accumulate": 1,
        "ema_decay": 0.0,
        "freeze_bn": False,
        "layer_decay": 1.0,
        "teacher": "",
        "teacher_share": 0.5,
        "teacher_temperature": 1.0,
    },
    "compute": {
        "device": "cpu",
        "channels_last": True,
        "compile": False,
        "gradient_dtype": "fp32",
        "gradient_checkpointing": False,
        "parallel": "ddp",
    },
    "run": {
        "dir": "",
        "processes": 1,
        "fresh": True,
        "init_from": "",
        "init_head": "probe",
        "log_every_steps": 10,
        "evaluate_every_epochs": 1e6,
        "best_by": "auto",
        "min_precision": 0.0,
        "error_cost": 0.0,
        "score_test": False,
        "patience": 0,
        "trackers": (),
        "max_minutes": 0.0,
        "finish_in_time": False,
        "timeout_seconds": 300.0,
    },
}
EVALUATED = 64  # images, once the clock has stopped
PLAIN = {"epochs": 1.0, "seed": 0, "deterministic": False, "precision": "fp32"}
PLAIN |= {"profile": False, "config": ""}


def build_config(**given: Any) -> Any:  # noqa: ANN401 - a config of the package
    """A config with `given` knobs: those of the run, and of a section as a dict.

    Raises:
        TypeError: if a knob is not named here, or there is no such knob.
    """
    from image_classifier.config import Config

    parts = {field.name: field.default_factory for field in dataclasses.fields(Config)}
    named = PLAIN | {key: value for key, value in given.items() if key not in SECTIONS}
    for name, knobs in SECTIONS.items():
        named[name] = complete(parts[name], knobs | given.get(name, {}))
    return complete(Config, named)


def complete(kind: Callable[..., Any], named: dict[str, Any]) -> Any:  # noqa: ANN401 - of a kind
    """A section of a config of which every knob is named.

    Raises:
        TypeError: if one is not.
    """
    missing = {field.name for field in dataclasses.fields(kind)} - named.keys()
    if missing:
        raise TypeError(f"name {', '.join(sorted(missing))} of {kind.__name__} in {__file__}")
    return kind(**named)


def input_batches(config: Any, ready: bool = True) -> Iterator[tuple[Any, Any]]:  # noqa: ANN401
    """The batches that `train` sees: `ready`, or before its `augment`."""
    from image_classifier.augment import build_augment
    from image_classifier.data.loader import TrainData
    from image_classifier.precision import Precision
    from image_classifier.preprocess import Normalize
    from image_classifier.runtime.distributed import join_world

    with join_world(config.compute) as world:
        data = TrainData(config, world)
        precision = Precision(config.precision, config.compute, config.optim, world.device)
        normalize = Normalize(data.source, config.data.image_size, precision)
        augment = build_augment(config.augment, data, normalize, config.seed)
        for step, batch in enumerate(data.batches(0, sys.maxsize)):
            yield augment(batch, step)[:2] if ready else (batch.images, batch.labels)


class EnoughError(Exception):
    """Everything is measured: `train` ends here, without an evaluation."""


def train(config: Any, batches: Callable[..., Iterable[Any]]) -> None:  # noqa: ANN401
    """Train at a constant learning rate.

    `batches` replaces `TrainData.batches`, which is its last argument: it reads the clock, and may
    raise `EnoughError`.
    """
    from image_classifier import optim
    from image_classifier.data.loader import TrainData
    from image_classifier.train import train

    optim.SCHEDULES["constant"] = lambda _: 1.0
    own = TrainData.batches
    TrainData.batches = lambda data, start, stop: batches(data, start, stop, own)
    with contextlib.suppress(EnoughError):
        train(config)


def offer_pixels(name: str, pixels: Any, labels: Any, **more: Any) -> None:  # noqa: ANN401
    """Let `--data.name` mean these images: (count, height, width, 3) uint8, and (count,) int64."""
    from image_classifier.data.datasets import DATASETS
    from image_classifier.data.datasets.source import Source

    classes = tuple(map(str, range(int(labels.max()) + 1)))

    def opened(_: object, split: str) -> Source:
        count = len(labels) if split == "train" else EVALUATED
        return Source(labels[:count], classes, pixels=pixels[:count], **more)

    DATASETS[name] = opened


def noise(count: int, size: int, num_classes: int, distinct: int) -> tuple[Any, Any]:
    """Images of nothing, and their labels; `distinct` of them, again and again."""
    import torch

    some = torch.randint(0, 256, (distinct, size, size, 3), dtype=torch.uint8)
    return some.repeat(-(-count // distinct), 1, 1, 1)[:count], torch.arange(count) % num_classes
