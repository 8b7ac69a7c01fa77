"""The page of a run, `report.html`: one file that needs neither a network nor scripts.

To add a section: a function that returns HTML, and its place in `write_page`. Text from outside,
such as the name of a class, passes through `escape`.
"""

import json
from collections.abc import Callable, Sequence
from html import escape
from math import sqrt
from operator import itemgetter
from pathlib import Path
from statistics import fmean, median
from typing import Any

from torch import Tensor

from ...config import Config
from ...data import Source
from ...errors import FaultError, UserError
from ...predictions import Predictions, calibrate, calibration_error
from ...runtime.config_dict import flatten
from ...runtime.files import read_object, read_rows, write_text
from ..html import PAGE, line_chart, reliability_diagram
from .images import Picture, gallery
from .tables import class_table, confused_pairs, confusion_matrix, definitions

PICTURES = 24  # wrong predictions that are shown
MOST_CLASSES = 20  # of a confusion matrix that can be read

# The numbers of the summary: name, metric, format, and what is shown of all values.
FACTS: tuple[tuple[str, str, str, Callable[[list[float]], float]], ...] = (
    ("best top-1", "val/top1", "{:.2%}", max),
    ("top-5", "val/top5", "{:.2%}", itemgetter(-1)),
    ("validation loss", "val/loss", "{:.4f}", itemgetter(-1)),
    ("images per second", "train/images_per_second", "{:,.0f}", median),
    ("waiting for data", "train/waited_fraction", "{:.1%}", fmean),
    ("of the device's peak (MFU)", "train/mfu", "{:.1%}", median),
)
# The charts: title, metrics, options of `line_chart`.
CHARTS: tuple[tuple[str, tuple[str, ...], dict[str, Any]], ...] = (
    ("Loss", ("train/loss", "val/loss"), {}),
    ("Validation top-1", ("val/top1",), {"unit": "%"}),
    ("Learning rate", ("train/lr",), {}),
    ("Images per second", ("train/images_per_second",), {"low": 0}),
    ("Waiting for data", ("train/waited_fraction",), {"unit": "%", "low": 0}),
)

Rows = list[dict[str, Any]]  # of metrics.jsonl
Samples = tuple[Tensor, Tensor, int]  # training images (count, height, width, channels); labels
# (count,) int64, or (count, classes) float32 if they are mixed; the step that used them


def write_page(
    folder: Path,
    predictions: Predictions,
    state: str = "",
    warnings: Sequence[str] = (),
    samples: Samples | None = None,
) -> None:
    """Write `report.html` to a run folder.

    Args:
        folder: the run folder, with metrics, config and environment.
        predictions: of the last evaluation.
        state: how far the run is.
        warnings: of the run.
        samples: augmented training images, on any device.

    Raises:
        OSError: if it cannot be written; the one before is kept.
    """
    rows = read_rows(folder / "metrics.jsonl")
    config, environment = (read_object(folder / f"{n}.json") for n in ("config", "environment"))
    classes, confusion = predictions.source.classes, predictions.confusion()
    heading, confusions = "Confusion matrix", confusion_matrix
    if len(classes) > MOST_CLASSES:
        heading, confusions = "Most confused classes", confused_pairs
    calibration = calibrate(predictions)
    name = escape(folder.resolve().name)
    about = f"{config['model.name']} on {config['data.name']}, {config['epochs']:g} epochs; "
    about += f"{environment['device']}; {state}"
    defaults = json.loads(json.dumps(flatten(Config())))  # as JSON has them: lists for tuples
    changed = [knob for knob, value in config.items() if value != defaults.get(knob)]
    body = [
        f"<h1>{name}</h1><p>{escape(about)}</p>",
        *(f'<p class="warning">{escape(line)}</p>' for line in warnings),
        f'<dl class="facts">{summary(rows, confusion, calibration)}</dl>',
        f'<div class="curves">{curves(rows)}</div>',
        '<div class="beside">',
        f"<section><h2>{heading}</h2>{confusions(classes, confusion)}</section>",
        f"<section><h2>Classes</h2>{class_table(classes, confusion)}</section>",
        "</div>",
        f"<h2>Calibration</h2>{calibration_section(calibration)}",
        "<h2>Most confident mistakes</h2><p>In color the predicted class, below it the true one. "
        f"Some may be wrong labels.</p>{mistakes(predictions)}",
        "" if samples is None else augmented(samples, classes),
        "<h2>Config</h2><p>Bold: changed from the default.</p>",
        f'<dl class="list">{definitions(config, changed)}</dl>',
        f'<h2>Environment</h2><dl class="list environment">{definitions(environment)}</dl>',
    ]
    # A path among the knobs may hold bytes that are not text: they are shown as `\udcff`.
    page = PAGE.substitute(title=name, body="\n".join(body))
    write_text(folder / "report.html", page)


def curve(rows: Rows, metric: str, unit: float = 1.0) -> list[tuple[float, float]]:
    """Epochs and values of a metric, in units of `unit`; rows without numbers are left out."""
    pairs = ((row.get("epoch"), row.get(metric)) for row in rows)
    return [(x, y / unit) for x, y in pairs if isinstance(x, float) and isinstance(y, float)]


def summary(rows: Rows, confusion: Tensor, calibration: Tensor) -> str:
    """The result in a few numbers, the most important first."""
    right, count = int(confusion.diagonal().sum()), int(confusion.sum())
    found = {f"top-1: {right:,} of {count:,} validation images": f"{right / count:.2%}"}
    for name, metric, form, of in FACTS:
        if values := [value for _, value in curve(rows, metric)]:
            found[name] = form.format(of(values))
    found["calibration error"] = f"{calibration_error(calibration):.1%}"
    return "".join(f"<div><dd>{value}</dd><dt>{what}</dt></div>" for what, value in found.items())


def curves(rows: Rows) -> str:
    """Charts of loss, accuracy, learning rate and throughput."""
    charts = []
    for title, metrics, options in CHARTS:
        unit = 0.01 if "unit" in options else 1.0
        lines = {metric.partition("/")[0]: curve(rows, metric, unit) for metric in metrics}
        charts.append(line_chart(title, lines, **options))
    return "".join(charts)


def calibration_section(calibration: Tensor) -> str:
    """Whether the model is over- or underconfident: a sentence and a diagram."""
    counts, confidence, accuracy = calibration
    count = float(counts.sum())
    if not count:
        return "<p>No prediction has a probability.</p>"
    said = float(counts @ confidence) / count
    right = float(counts @ accuracy) / count
    noise = 2 * sqrt(right * (1 - right) / count)  # two standard errors
    verdict = "neither over- nor underconfident"
    if abs(said - right) > max(noise, 0.005):
        kind = "overconfident" if said > right else "underconfident"
        verdict = f"{kind} by {100 * abs(said - right):.1f} points"
    return (
        f'<div class="reliability">{reliability_diagram(calibration)}<p>Mean confidence '
        f"{said:.1%}, accuracy {right:.1%}: {verdict}. Expected calibration error (ECE): "
        f"{calibration_error(calibration):.1%}.</p></div>"
    )


def mistakes(predictions: Predictions) -> str:
    """The wrong predictions with the highest confidence: image, predicted and true class."""
    source, pictures = predictions.source, []
    wrong = (predictions.is_counted & ~predictions.is_correct).nonzero().flatten()
    surest = predictions.probability[wrong].argsort(descending=True, stable=True)
    for index in wrong[surest][:PICTURES].tolist():
        predicted, target = int(predictions.predicted[index]), int(source.labels[index])
        lines = [
            ("wrong-class", source.classes[predicted], f"{predictions.probability[index]:.1%}"),
            ("true", source.classes[target], f"{predictions.target_probability[index]:.1%}"),
        ]
        title = f"image {index}"
        if source.paths is not None:
            title = source.paths.relative(index).decode("utf-8", "backslashreplace")
        pictures.append(Picture(read_image(source, index), title, lines))
    return gallery(pictures)


def augmented(samples: Samples, classes: tuple[str, ...]) -> str:
    """Training images as the model saw them, with the shares of mixed labels."""
    pixels, labels, step = samples
    pictures = []
    for image, label in zip(pixels.cpu(), labels.cpu(), strict=True):
        if label.ndim:
            shares = sorted(((float(label[n]), int(n)) for n in label.nonzero()), reverse=True)
            lines = [("true", classes[n], f"{share:.1%}") for share, n in shares]
        else:
            lines = [("true", classes[int(label)], "")]
        pictures.append(Picture(image, f"step {step}", lines))
    note = f"As the model saw them in step {step:,}."
    return f"<h2>Augmented training images</h2><p>{note}</p>{gallery(pictures)}"


def read_image(source: Source, index: int) -> Tensor | None:
    """The whole image `index`; None if it cannot be read any more."""
    try:
        return source.read(index)
    except (UserError, FaultError):
        return None
