"""Scores the weights of `best.pt` on the test images, once, when a run has ended."""

import json
from html import escape
from math import sqrt
from pathlib import Path

from ...data import EvalData
from ...evaluate import Scores, evaluate
from ...metrics import phrase
from ...runtime.console import say
from ...runtime.distributed import World
from ...runtime.files import read_rows, write_json
from ...tasks import metric_of
from ...tracking import Observer, Result, Setup, check_same_classes

NORMAL = 1.96  # standard deviations of an interval of 95 %


def open_observer(setup: Setup) -> Observer:
    """Open the test images, if the run is to be scored by them; rank 0 evaluates them alone.

    Raises:
        UserError: if there are none, or they have other classes.
    """
    config = setup.config
    train = setup.train_data.source
    said = "images of one group, {}, are in one split"
    if train.paths is None:
        said = "--data.groups {}: the images have no paths, in which to find a group"
    by_group = (said.format(ascii(config.data.groups)),) * bool(config.data.groups)
    if not (config.run.score_test or config.data.test_fraction):
        return Observer(notes=by_group)
    world = World(setup.world.device)
    how = {"task": train.task, "mean_std": (train.mean, train.std), "classes": train.classes}
    batch_size = setup.val_data.batch_size  # for which there is memory
    images = EvalData(config.data, "test", world, config.run, batch_size, **how)
    check_same_classes(train, images.source, "test")
    val = setup.val_data.source
    is_seen = val.is_test or val.has_same_images(images.source)  # as CIFAR's, which validate too
    chosen = "by which best.pt was chosen" if is_seen else "by which nothing was chosen"
    use = "which validate, too" if is_seen else "for the score at the end alone"
    note = f"{len(images):,} test images, {use}"
    told = ""

    def conclude(result: Result) -> str:
        nonlocal told
        if not result.is_last:
            return ""
        if result.model is None:
            say("test: not scored, as no process has all weights: `evaluate RUN --split test`")
            return ""
        scores = evaluate(result.model, images, setup.normalize, setup.precision)
        images.close()
        metrics = scores.metrics(*scores.names)
        keep(Path(config.run.dir), {n.replace("val/", "test/"): v for n, v in metrics.items()})
        told = f"{phrase(metrics, metric_of(config))}{interval(scores)}"
        say(f"test: {told}; {len(images):,} images {chosen}")
        return ""

    def section(*_: object) -> str:
        return f"<h2>Test</h2><p>{escape(told)}, of images {chosen}.</p>" * bool(told)

    return Observer(notes=(*by_group, note), conclude=conclude, section=section)


def keep(folder: Path, found: dict[str, float]) -> None:
    """Write metrics to `test.json`, and as the last row of `metrics.jsonl`, once."""
    try:
        write_json(folder / "test.json", found)
        path = folder / "metrics.jsonl"
        rows = read_rows(path) if path.exists() else []
        last = rows[-1] if rows else {}
        if not last.keys() & found.keys():
            row = {name: last[name] for name in ("step", "epoch") if name in last} | found
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    except OSError as error:
        say(f"cannot write {str(folder / 'test.json')!a}: {error.strerror}")


def interval(scores: Scores) -> str:
    """The interval of 95 % of top-1, by Wilson; nothing of several labels.

    https://doi.org/10.1080/01621459.1927.10502953
    """
    if scores.predictions.source.is_multi_label:
        return ""
    count = int(scores.predictions.is_counted.sum())
    share = scores.value("top1")
    middle = share + NORMAL**2 / (2 * count)
    width = NORMAL * sqrt(share * (1 - share) / count + NORMAL**2 / (4 * count**2))
    whole = 1 + NORMAL**2 / count
    ends = (max(0.0, (middle + sign * width) / whole) for sign in (-1, 1))  # -0.0 by rounding
    return ", top-1 within {:.1%} .. {:.1%} (95 %)".format(*ends)
