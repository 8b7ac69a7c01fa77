"""The page of a run, `report.html`: one file that needs neither a network nor scripts.

To add a section: a function that returns HTML, and its place in `write_page`; a tool has it in its
`Observer`. Text from outside, such as the name of a class, passes through `escape`.
"""

import json
from collections.abc import Callable
from html import escape
from math import sqrt
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from torch import Tensor

from ...config import Config
from ...metrics import (
    METRICS,
    Predictions,
    against_the_rest,
    calibrate,
    calibration_error,
    find_metric,
    metric_number,
    metric_title,
)
from ...runtime.config_dict import flatten
from ...runtime.files import read_object, read_rows, write_text
from ...tasks import metric_of
from ...tracking import Result
from .. import report
from .charts import PAGE, line_chart, reliability_diagram
from .galleries import Explain, Samples, augmented, class_examples, mistakes
from .tables import class_table, confused_pairs, confusion_matrix, definitions

MOST_CLASSES = 20  # of a confusion matrix that can be read
MOST_LINES = 6  # of a chart
MOST_SHARES = 2**23  # probabilities of which curves are drawn, as that takes seconds

# The summary of a run's speed: name, metric, format, and what is shown of all values.
FACTS: tuple[tuple[str, str, str, Callable[[list[float]], float]], ...] = (
    ("images per second", "train/images_per_second", "{:,.0f}", median),
    ("waiting for data", "train/waited_fraction", "{:.1%}", fmean),
    ("of the device's peak (MFU)", "train/mfu", "{:.1%}", median),
)
# The charts: title, metrics, options of `line_chart`.
CHARTS: tuple[tuple[str, tuple[str, ...], dict[str, Any]], ...] = (
    ("Loss", ("train/loss", "val/loss"), {}),
    ("Learning rate", ("train/lr",), {}),
    ("Images per second", ("train/images_per_second",), {"low": 0}),
    ("Waiting for data", ("train/waited_fraction",), {"unit": "%", "low": 0}),
)

Rows = list[dict[str, Any]]  # of metrics.jsonl


def write_page(
    folder: Path, result: Result, samples: Samples | None = None, explain: Explain | None = None
) -> None:
    """Write `report.html` to a run folder.

    Args:
        folder: the run folder, with metrics, config and environment.
        result: of the best weights; of the last ones while the run goes on.
        samples: augmented training images, on any device.
        explain: shows what the model looked at.

    Raises:
        OSError: if it cannot be written; the one before is kept.
    """
    rows = read_rows(folder / "metrics.jsonl")
    config = read_object(folder / "config.json")
    environment = read_object(folder / "environment.json")
    predictions = result.predictions
    metric = metric_of(config)
    shares = predictions.probabilities
    calibration = calibrate(predictions)
    is_quick = shares is not None and shares.numel() <= MOST_SHARES
    name = escape(folder.resolve().name)
    about = f"{config['model.name']} on {config['data.name']}"
    about += f", {config['epochs']:g} epochs" if config["epochs"] else ""
    steps = f"step {result.step:,} of {result.total_steps:,}" * bool(result.total_steps)
    about += f"; {environment['device']}; {steps or 'linear probe'}; {result.end}"
    defaults = json.loads(json.dumps(flatten(Config())))  # as JSON has them: lists for tuples
    defaults["run.best_by"] = metric_of(config | {"run.best_by": "auto"})
    drawn = defaults["run.best_by"] if metric == "loss" else metric  # beside the loss
    changed = {k: value for k, value in config.items() if value != defaults.get(k)}
    body = [
        f"<h1>{name}</h1><p>{escape(about)}</p>",
        *(f'<p class="warning">{escape(line)}</p>' for line in result.warnings),
        f'<dl class="facts">{summary(rows, predictions, result.metrics, metric)}</dl>',
        f'<div class="charts">{curves(rows, drawn)}</div>',
        '<div class="beside">',
        confusion_section(predictions),
        f"<section><h2>Classes</h2>{class_table(predictions, is_quick)}</section>",
        "</div>",
        f"<h2>Probabilities</h2><p>{calibration_text(calibration)}</p>",
        '<div class="charts">',
        reliability_diagram(calibration) if calibration[0].any() else "",
        ranking_curves(predictions) if is_quick else "",
        "</div>",
        *(build(result, report) for build in result.sections),
        class_examples(predictions) if result.is_last else "",
        f"<h2>Most confident mistakes</h2>{mistakes(predictions, explain)}",
        "" if samples is None else augmented(samples, predictions.source.classes),
        f'<h2>Config</h2><dl class="list">{definitions(changed)}</dl>',
        f'<details><summary>All options</summary><dl class="list">{definitions(config)}</dl>',
        "</details>",
        f'<h2>Environment</h2><dl class="list environment">{definitions(environment)}</dl>',
    ]
    # A path among the knobs may hold bytes that are not text: they are shown as `\udcff`.
    write_text(folder / "report.html", PAGE.substitute(title=name, body="\n".join(body)))


def curve(rows: Rows, metric: str, unit: float = 1.0) -> list[tuple[float, float]]:
    """Epochs and values of a metric, in units of `unit`; rows without numbers are left out."""
    pairs = ((row.get("epoch"), row.get(metric)) for row in rows)
    return [(x, y / unit) for x, y in pairs if isinstance(x, float) and isinstance(y, float)]


def summary(rows: Rows, predictions: Predictions, metrics: dict[str, float], best_by: str) -> str:
    """The result in a few numbers, the most important first."""
    classes = predictions.source.classes
    found = {}
    if not predictions.source.is_multi_label:
        right = int((predictions.is_correct & predictions.is_counted).sum())
        count = int(predictions.is_counted.sum())
        found[f"top-1: {right:,} of {count:,} validation images"] = f"{right / count:.2%}"
    values = {name: metrics[f"val/{name}"] for name in METRICS if f"val/{name}" in metrics}
    for name in dict.fromkeys((best_by, *values)):
        if name in values and name != "top1":
            found[metric_title(name)] = metric_number(name, values[name])
        last = curve(rows, f"val/{name}")[-1:]
        if name == best_by and last and last[0][1] != values.get(name):
            found[f"{metric_title(name)} of the last weights"] = metric_number(name, last[0][1])
    if "val/classes" in metrics:
        found["classes with validation images"] = f"{metrics['val/classes']} of {len(classes)}"
    for name, metric, form, of in FACTS:
        if rates := [value for _, value in curve(rows, metric)]:
            found[name] = form.format(of(rates))
    return "".join(f"<div><dd>{value}</dd><dt>{what}</dt></div>" for what, value in found.items())


def curves(rows: Rows, metric: str) -> str:
    """Charts of loss, the metric that decides, learning rate and throughput."""
    options = {"unit": "%"} if find_metric(metric).is_percent else {}
    name = metric_title(metric)
    own = (name[0].upper() + name[1:], (f"train/{metric}", f"val/{metric}"), options)
    charts = []
    for title, metrics, options in (CHARTS[0], own, *CHARTS[1:]):
        unit = 0.01 if "unit" in options else 1.0
        lines = {metric.partition("/")[0]: curve(rows, metric, unit) for metric in metrics}
        charts.append(line_chart(title, lines, **options))
    return "".join(charts)


def confusion_section(predictions: Predictions) -> str:
    """Which classes are taken for which; with several labels that is no question."""
    if predictions.source.is_multi_label:
        return ""
    if len(predictions.source.classes) > MOST_CLASSES:
        return f"<section><h2>Most confused classes</h2>{confused_pairs(predictions)}</section>"
    return f"<section><h2>Confusion matrix</h2>{confusion_matrix(predictions)}</section>"


def ranking_curves(predictions: Predictions) -> str:
    """Precision over recall, and ROC: of each class, or of many all taken together."""
    from sklearn.metrics import precision_recall_curve, roc_curve

    pairs = {predictions.source.classes[n]: pair for n, *pair in against_the_rest(predictions)}
    if len(pairs) > MOST_LINES:
        pairs = {"micro average": map(np.concatenate, zip(*pairs.values(), strict=True))}
    precisions = {}
    rocs = {}
    for name, (is_own, share) in pairs.items():
        precision, recall, _ = precision_recall_curve(is_own, share)
        precisions[name] = [*zip(recall[::-1].tolist(), precision[::-1].tolist(), strict=True)]
        false, true, _ = roc_curve(is_own, share)
        rocs[name] = [*zip(false.tolist(), true.tolist(), strict=True)]
    options = {"low": 0, "has_colors": True}
    return line_chart(
        "Precision over recall", precisions, x_label="recall", **options
    ) + line_chart("ROC: true positives", rocs, x_label="share of false positives", **options)


def calibration_text(calibration: Tensor) -> str:
    """Whether the model is over- or underconfident."""
    counts, confidence, accuracy = calibration
    count = float(counts.sum())
    if not count:
        return "No prediction has a probability."
    said = float(counts @ confidence) / count
    right = float(counts @ accuracy) / count
    noise = 2 * sqrt(right * (1 - right) / count)  # two standard errors
    verdict = "neither over- nor underconfident"
    if abs(said - right) > max(noise, 0.005):
        kind = "overconfident" if said > right else "underconfident"
        verdict = f"{kind} by {100 * abs(said - right):.1f} points"
    return (
        f"Mean confidence {said:.1%}, accuracy {right:.1%}: {verdict}. Expected calibration error "
        f"(ECE): {calibration_error(calibration):.1%}."
    )
