"""K runs, each of which is validated on another K-th of the images and trained on the others."""

from dataclasses import asdict, replace

import torch

from ...config import Config, DataConfig, ModelConfig
from ...data import Source, open_dataset
from ...errors import UserError
from ...extensions import find_tool
from ...metrics import confusion_of, counted_and_correct, find_metric, metric_title, scores_text
from ...runtime.command_line import command
from ...runtime.console import say
from ...runtime.files import write_json
from ..runs.many_runs import as_json, check_run, mean_text, print_table, train_all
from ..runs.recipe import Recipe
from ..runs.saved_runs import grain_of
from ..statistics.statistics import mean_of

MOST_CLASSES = 1000  # of a confusion matrix that is written


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
    folds = open_folds(recipe.config.data, count, recipe.config.model.task)
    runs = train_all(recipe, each)
    for run, fold in zip(runs, folds, strict=True):
        check_run(run, recipe.config, (fold.fingerprint(), fold.file_digests))
    predicted = torch.cat([run.predictions.predicted for run in runs]).long()
    target = torch.cat([run.predictions.target for run in runs]).long()
    classes = runs[0].predictions.classes
    counted, right = counted_and_correct(predicted, target)
    share = int(right.sum()) / int(counted.sum())
    num_images = len(target)
    pooled = "top1" if target.ndim == 1 else "exact"
    answers = [int(run.predictions.is_counted.sum()) for run in runs]
    losses = (run.loss * own for run, own in zip(runs, answers, strict=True))
    scores = {f"val/{pooled}": share, "val/loss": sum(losses) / sum(answers)}
    has_label, _ = counted_and_correct(target, target)
    if bad := int((has_label & ~counted).sum()):
        scores["val/bad_images"] = bad
    metric = runs[0].metric
    found = mean_of(
        [run.score for run in runs],
        grain_of(runs),
        # Folds share training images, so their deviation is too small for an interval
        # (https://www.jmlr.org/papers/v5/grandvalet04a.html). The ratio of validation to training
        # images corrects it: https://doi.org/10.1023/A:1024068626366
        overlap=1 / (count - 1),
        is_share=find_metric(metric).is_percent,
    )
    content = {
        "preset": recipe.preset,
        "images": num_images,
        "runs": [{"fold": fold} | as_json(run) for fold, run in enumerate(runs)],
        f"pooled_{pooled}": share,
        metric: asdict(found),
        "classes": list(classes),
    }
    recall = ()
    if target.ndim == 1:
        images = target[counted].bincount(minlength=len(classes))
        recall = (target[right].bincount(minlength=len(classes)) / images).tolist()
        if len(classes) <= MOST_CLASSES:
            content["confusion"] = confusion_of(predicted, target, len(classes)).tolist()
    write_json(recipe.folder / "results.json", content)
    print_table("fold", dict(enumerate(runs)))
    print(f"{num_images:,} images, each validated once by the run that did not train on it:")
    print(scores_text(scores, recall, classes, "top1"))
    if any(run.score != run.last_score for run in runs):
        print("of each fold the weights that are the best on its own images: optimistic")
    print(f"by folds: {metric_title(metric)} {mean_text(found, f'{count} folds', metric)}")
    print(
        "folds share training images, so their standard deviation is too small for an interval: "
        "this one has the correction of Nadeau and Bengio (2003)"
    )
    if find_tool("command", "ensemble"):
        print(f"all {count} as one model: {command('ensemble')} {str(recipe.folder)!a}")


def open_folds(data: DataConfig, count: int, task: str = ModelConfig.task) -> list[Source]:
    """The validation images of each fold: together all of the images, each of them once.

    Where all images of a class are in one fold, one of them is always for training.

    Raises:
        UserError: if the dataset does not divide its images so.
    """
    folds = []
    names = set()
    num_images = 0
    for fold in range(count):
        own = Config(data=replace(data, val_fraction=1 / count, fold=fold)).data
        folds.append(open_dataset(own, "val").fitted(task, "val"))
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
    missing = 0 if data.limit else num_images - len(names)
    table = getattr(data, "labels", "")  # perhaps with a column of folds
    if table and missing > len(folds[0].classes):
        raise UserError(
            f"folds 0 .. {count - 1} have {len(names):,} of {num_images:,} images: the table "
            f"{table!a} has more; cross-validate takes as many as there are"
        )
    if missing:
        say(
            f"{missing:,} images are validated by no run: without them, one has none of their class"
        )
    return folds
