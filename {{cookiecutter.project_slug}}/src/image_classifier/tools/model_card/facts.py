"""What the files of a run say of its model, and the dataset of its images, if it is there."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...checkpoints import LoadedModel, load_model
from ...config import ComputeConfig, Config
from ...data import Source, open_dataset
from ...errors import UserError
from ...metrics import counted_and_correct
from ...runtime.distributed import join_world
from ...runtime.files import read_object, read_rows
from ..runs.saved_runs import Run, SavedPredictions, evaluations, read_run
from .origin import public

CONFIDENCE = 0.95


class Share(NamedTuple):
    """How many of `count` images are right."""

    right: int
    count: int

    @property
    def share(self) -> float:
        """From 0 to 1; more than that of no images, which come last."""
        return self.right / self.count if self.count else 2.0

    @property
    def interval(self) -> tuple[float, float]:
        """Where the share lies with 95 % confidence, by Wilson.

        https://doi.org/10.1080/01621459.1927.10502953
        """
        from scipy.stats import binomtest

        found = binomtest(self.right, self.count).proportion_ci(CONFIDENCE, "wilson")
        return float(found.low), float(found.high)

    def __str__(self) -> str:
        if not self.count:
            return ""
        low, high = self.interval
        return f"{self.share:.1%} ({100 * low:.1f} .. {100 * high:.1f})"


class ClassRow(NamedTuple):
    """The result of one class on the validation images."""

    name: str
    recall: Share  # of the images of the class
    precision: Share  # of the images that are taken for it


class Part(NamedTuple):
    """The images of a split."""

    size: int
    by_class: Tensor  # how many have each label: (classes,) int64


@dataclass(frozen=True)
class Facts:
    """All that a card is written from."""

    license: str  # of the model, as its owner says
    run: Run
    loaded: LoadedModel
    predictions: SavedPredictions
    metrics: dict[str, float]  # of the best weights on the validation images: `top1` and so on
    test_metrics: dict[str, float]  # on the test images; none if they were not scored
    environment: dict[str, Any]
    parts: dict[str, Part]  # training, and test if it was scored; none if they are there no more

    @property
    def name(self) -> str:
        """That of the run folder."""
        return self.run.folder.resolve().name

    @property
    def dataset(self) -> str:
        """The name of the dataset: that of its folder, if it is one of the user's."""
        data = self.config.data
        return data.name if data.root == type(data).root else public(data.root)

    @property
    def config(self) -> Config:
        """That of the run."""
        return self.loaded.config

    @property
    def is_multi_label(self) -> bool:
        """Whether an image may have several labels."""
        return self.predictions.target.ndim == 2

    @property
    def num_weights(self) -> int:
        """The number of weights, without buffers."""
        return sum(weight.numel() for weight in self.loaded.model.parameters())

    @cached_property
    def right(self) -> Share:
        """How many images are right: with several labels, all of their labels."""
        counted, right = counted_and_correct(self.predictions.predicted, self.predictions.target)
        return Share(int(right.sum()), int(counted.sum()))

    @property
    def test_right(self) -> Share | None:
        """How many test images are right; None if their number is unknown."""
        part = self.parts.get("test")
        if part is None or "top1" not in self.test_metrics:
            return None
        count = part.size - int(self.test_metrics.get("bad_images", 0))
        return Share(round(self.test_metrics["top1"] * count), count)

    @cached_property
    def classes(self) -> list[ClassRow]:
        """The result of each class."""
        columns = zip(*self.class_counts(), strict=True)
        return [
            ClassRow(name, Share(hit, has), Share(hit, taken))
            for name, (hit, has, taken) in zip(self.predictions.classes, columns, strict=True)
        ]

    def class_counts(self) -> list[list[int]]:
        """How many images each class has right, has, and is taken for, of those that count."""
        truth = self.predictions.target.long()
        found = self.predictions.predicted.long()
        known = self.predictions.is_counted
        if self.is_multi_label:
            has = (truth == 1) & known
            taken = (found == 1) & known
            return [table.sum(0).tolist() for table in (has & taken, has, taken)]
        count = len(self.predictions.classes)
        labels = truth[known & (truth == found)], truth[known], found[known]
        return [torch.bincount(each, minlength=count).tolist() for each in labels]


def read_facts(folder: Path, license_: str) -> Facts:
    """Read a run that has ended, and which is published under `license_`.

    Raises:
        UserError: if it is none, or one of its files can't be used.
    """
    run = read_run(folder)
    predictions = run.need_predictions()
    compute = ComputeConfig(device="cpu")
    with join_world(compute) as world:
        loaded = load_model(str(folder), compute, world)
    if (loaded.step, loaded.classes) != (predictions.step, predictions.classes):
        raise UserError(
            f"the predictions in {str(folder)!a} are of step {predictions.step}, best.pt is of "
            f"step {loaded.step}: run its command again, which takes one evaluation"
        )
    test_metrics = of_split("test", read_if_there(folder / "test.json"))
    return Facts(
        license=license_,
        run=run,
        loaded=loaded,
        predictions=predictions,
        metrics=of_split("val", best_metrics(folder, run)),
        test_metrics=test_metrics,
        environment=read_if_there(folder / "environment.json"),
        parts=open_parts(loaded, has_test=bool(test_metrics)),
    )


def read_if_there(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no such file."""
    return read_object(path) if path.is_file() else {}


def best_metrics(folder: Path, run: Run) -> dict[str, Any]:
    """The metrics of the best weights: all of them at the end of a run, else some."""
    result = read_if_there(folder / "status.json").get("result")
    if isinstance(result, dict) and result.get("step") == run.predictions.step:
        return result
    rows = evaluations(read_rows(folder / "metrics.jsonl"), run.metric)
    return next(row for row in rows if row["step"] == run.predictions.step)


def of_split(split: str, row: dict[str, Any]) -> dict[str, float]:
    """The numbers of a row that are metrics of a split, by their names without it."""
    start = f"{split}/"
    found = {name.removeprefix(start): v for name, v in row.items() if name.startswith(start)}
    return {name: value for name, value in found.items() if isinstance(value, int | float)}


def open_parts(loaded: LoadedModel, has_test: bool) -> dict[str, Part]:
    """The images that the model was trained with, and tested on; none if they are there no more."""
    try:
        train = open_part(loaded, "train")
        # A space separates what says that they are prepared.
        now = train.fingerprint().partition(" ")[0]
        if now != loaded.fingerprint.partition(" ")[0]:
            return {}
        parts = {"training": train} | ({"test": open_part(loaded, "test")} if has_test else {})
    except (UserError, OSError):
        return {}
    return {name: Part(len(source), source.class_counts()) for name, source in parts.items()}


def open_part(loaded: LoadedModel, split: str) -> Source:
    """The images of a split, with the labels and classes of the model.

    Raises:
        UserError: if there are none, or their labels don't fit.
    """
    return loaded.check_images(open_dataset(loaded.config.data, split), split)
