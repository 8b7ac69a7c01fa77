"""K runs, each of which is validated on another K-th of the images and trained on the others."""

from dataclasses import asdict, replace

import torch
from torch import Tensor

from ...config import Config, DataConfig
from ...data import LEFT_OUT, Source, open_dataset
from ...errors import UserError
from ...predictions import scores_text
from ...runtime.files import write_json
from ..many_runs import as_json, mean_text, print_table, train_all
from ..recipe_options import Recipe
from ..saved_runs import Run, SavedPredictions
from ..statistics import mean_of


def cross_validate(recipe: Recipe, count: int) -> None:
    """Train `count` runs, and print and write how good they are on the images of their folds.

    Raises:
        UserError: if the images cannot be divided so, or a run cannot be trained so.
        FaultError: if a run failed, or a signal ended this.
    """
    for knob in ("val_fraction", "fold"):
        if f"data.{knob}" in recipe.changed:
            raise UserError(f"cross-validate {count} decides --data.{knob.replace('_', '-')}")
    each = {
        f"fold-{fold}": {"data.val_fraction": 1 / count, "data.fold": fold} for fold in range(count)
    }
    folds = open_folds(recipe.config.data, count)
    runs = train_all(recipe, each)
    predictions = [predictions_of(run, fold) for run, fold in zip(runs, folds, strict=True)]
    confusion, classes = sum(map(confusion_of, predictions)), predictions[0].classes
    num_counted, num_right = int(confusion.sum()), int(confusion.trace())
    num_images = sum(map(len, folds))
    # A fold's validation images are 1 / (K - 1) of its training images.
    found = mean_of([run.top1 for run in runs], count / num_images, 1 / (count - 1))
    loss = sum(run.loss * len(fold) for run, fold in zip(runs, folds, strict=True)) / num_images
    scores = {"val/top1": num_right / num_counted, "val/loss": loss}
    if num_counted < num_images:
        scores["val/bad_images"] = num_images - num_counted
    content = {
        "preset": recipe.preset,
        "images": num_images,
        "runs": [{"fold": fold} | as_json(run) for fold, run in enumerate(runs)],
        "pooled_top1": scores["val/top1"],
        "top1": asdict(found),
        "classes": list(classes),
        "confusion": confusion.tolist(),
    }
    write_json(recipe.folder / "results.json", content)
    print_table("fold", [*range(count)], runs)
    print(f"{num_images:,} images, each validated once by the run that did not train on it:")
    print(scores_text(scores, confusion, classes))
    print(f"by folds: top-1 {mean_text(found, f'{count} folds')}")
    print(
        "folds share training images, so their standard deviation is too small for an interval: "
        "this one has the correction of Nadeau and Bengio (2003)"
    )


def open_folds(data: DataConfig, count: int) -> list[Source]:
    """The validation images of each fold: together all of the images, each of them once.

    Raises:
        UserError: if the dataset does not divide its images so, or all images of a class are in one
            fold.
    """
    folds, names, num_images = [], set(), 0
    for fold in range(count):
        own = Config(data=replace(data, val_fraction=1 / count, fold=fold)).data
        folds.append(open_dataset(own, "val"))
        paths = folds[-1].paths
        if paths is None:
            raise UserError(
                f"cross-validate divides files by their names, and {data.name} has none: its "
                "validation images are fixed; `repeat` trains with several seeds"
            )
        names |= {paths.relative(index) for index in range(len(paths))}
        num_images = len(open_dataset(own, "train")) + len(folds[-1])
    if len(names) < sum(map(len, folds)):
        raise UserError(
            f"dataset {data.name!r} has the same validation images in several folds: it should "
            "choose them by data.fold, as `folder` does"
        )
    if len(names) < num_images and not data.limit:
        raise UserError(
            f"folds 0 .. {count - 1} have {len(names):,} of {num_images:,} images: the table "
            f"{data.labels!a} has more; cross-validate takes as many as there are"
        )
    return folds


def predictions_of(run: Run, fold: Source) -> SavedPredictions:
    """The predictions of a run that is done, for the images of its fold.

    Raises:
        UserError: if they are of other images.
    """
    saved = run.predictions
    same = saved and saved.images.partition(" ")[0] == fold.fingerprint().partition(" ")[0]
    if not same:
        raise UserError(
            f"the images have changed since {str(run.folder)!a} was trained: start over with "
            "--run.fresh, or take another --run.dir"
        )
    return saved


def confusion_of(saved: SavedPredictions) -> Tensor:
    """The confusion matrix, (classes, classes) int64: row target, column prediction."""
    counted, classes = saved.predicted != LEFT_OUT, len(saved.classes)
    cells = saved.target[counted].long() * classes + saved.predicted[counted]
    return torch.bincount(cells, minlength=classes**2).view(classes, classes)
