"""The page of a run, `report.html`: one file that needs neither a network nor scripts.

To add a section: a function that returns HTML, and its place in `write_page`. Text from outside,
such as the name of a class, passes through `escape`.
"""

import json
import re
import time
from collections.abc import Callable, Sequence
from html import escape
from math import sqrt
from operator import itemgetter
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ...config import Config
from ...data import Source
from ...errors import FaultError, UserError
from ...predictions import Calibration, Predictions, calibrate
from ...runtime.config_dict import flatten
from ...runtime.files import read_object, read_rows, write_text
from .. import html

PICTURES = 24  # in each gallery
MOST_SHARE = 0.02  # of a run's time that writing its page may take before the end
USUAL_SECONDS = 0.5  # of writing a page, as long as none was written
STATE = re.compile('(?<=<p class="state">)[^<]*')

# The numbers of the summary: name, metric, format, and what is shown of all values.
FACTS: tuple[tuple[str, str, str, Callable[[list[float]], float]], ...] = (
    ("top-5", "val/top5", "{:.2%}", itemgetter(-1)),
    ("validation loss", "val/loss", "{:.4f}", itemgetter(-1)),
    ("images per second", "train/images_per_second", "{:,.0f}", median),
    ("waiting for data", "train/waited_fraction", "{:.1%}", fmean),
    ("of the device's peak (MFU)", "train/mfu", "{:.1%}", median),
    ("device busy", "device/utilisation", "{:.0%}", fmean),
    ("energy", "energy_joules", "{:,.4g} Wh", lambda joules: joules[-1] / 3600),
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


class Samples(NamedTuple):
    """Augmented training images, on the device."""

    step: int
    pixels: Tensor  # (count, height, width, 3) uint8
    labels: Tensor  # (count,) int64, or (count, classes) float32 if they are mixed


class Page:
    """The page of a run, rewritten during the run whenever that takes little of its time."""

    def __init__(self, folder: Path) -> None:
        """In the run folder; nothing is written yet."""
        self.path = folder / "report.html"
        self.samples: Samples | None = None
        self.warnings: list[str] = []
        self.written, self.took_seconds = time.monotonic(), USUAL_SECONDS

    def record_augmented_samples(self, pixels: Tensor, labels: Tensor, step: int) -> None:
        """Keep training images to show, as the model sees them; nothing waits for the device.

        Args:
            pixels: (count, height, width, 3) uint8.
            labels: (count,) int64, or (count, classes) float32 if they are mixed.
            step: in which they are used.
        """
        self.samples = Samples(step, pixels[:PICTURES], labels[:PICTURES].clone())

    @property
    def is_due(self) -> bool:
        """Whether writing it would take little of the time since it was written."""
        return self.took_seconds <= MOST_SHARE * (time.monotonic() - self.written)

    def write(self, predictions: Predictions, state: str) -> None:
        """Write the page, with the predictions of the last evaluation; `state` is that of the run.

        Raises:
            OSError: if it cannot be written; the one before is kept.
        """
        began = time.monotonic()
        write_page(self.path.parent, predictions, state, self.samples, self.warnings)
        self.written = time.monotonic()
        self.took_seconds = self.written - began

    def contact_sheets(self, predictions: Predictions) -> dict[str, np.ndarray]:
        """Contact sheets by name, for trackers: each (height, width, 3) uint8."""
        errors = (read_image(predictions.source, n) for n in predictions.worst(PICTURES))
        images = {"mistakes": [pixels for pixels in errors if pixels is not None]}
        if self.samples is not None:
            images["training images"] = list(self.samples.pixels.cpu())
        return {name: html.contact_sheet(some) for name, some in images.items() if some}

    def restate(self, state: str) -> None:
        """Change only the state of the run, if there is a page.

        Raises:
            OSError: if it cannot be written; the one before is kept.
        """
        if self.path.exists():
            text = self.path.read_text(encoding="utf-8", errors="replace")
            write_text(self.path, STATE.sub(lambda _: escape(state), text, count=1))


def write_page(
    folder: Path,
    predictions: Predictions,
    state: str = "",
    samples: Samples | None = None,
    warnings: Sequence[str] = (),
) -> None:
    """Write `report.html` from what a run wrote to `folder`, and its last evaluation."""
    rows = read_rows(folder / "metrics.jsonl")
    config, environment = (read_object(folder / f"{n}.json") for n in ("config", "environment"))
    classes, confusion = predictions.source.classes, predictions.confusion()
    heading, confusions = "Confusion matrix", html.confusion_matrix
    if len(classes) > 20:  # such a matrix would be too large to read
        heading, confusions = "Most confused classes", html.confused_pairs
    calibration = calibrate(predictions)
    about = f"{config['model.name']} on {config['data.name']}, {config['epochs']:g} epochs; "
    about += environment["device"]
    defaults = json.loads(json.dumps(flatten(Config())))  # as JSON has them: lists for tuples
    changed = [knob for knob in config.items() if knob not in defaults.items()]
    warned = "".join(f'<p class="warning">{escape(line)}</p>' for line in warnings)
    wrong, unsure = predictions.worst(PICTURES), predictions.least_certain(PICTURES)
    body = [
        f"<h1>{escape(folder.resolve().name)}</h1><p>{escape(about)}</p>",
        f'<p class="state">{escape(state)}</p>',
        f'<dl class="facts">{summary(rows, confusion, calibration)}</dl>',
        f"<section><h2>Warnings</h2>{warned}</section>" if warnings else "",
        f'<div class="curves">{curves(rows)}</div>',
        '<div class="beside">',
        f"<section><h2>{heading}</h2>{confusions(classes, confusion)}</section>",
        f"<section><h2>Classes</h2>{html.class_table(classes, confusion)}</section>",
        "</div>",
        f"<h2>Calibration</h2>{calibration_section(calibration)}",
        "<h2>Most confident mistakes</h2><p>In colour the predicted class, below it the true one. "
        f"Some may be wrong labels.</p>{gallery(predictions, wrong)}",
        f"<h2>Least confident predictions</h2>{gallery(predictions, unsure)}",
        "" if samples is None else augmented(samples, classes),
        "<h2>Config</h2><p>Bold: changed from the default.</p>",
        f'<dl class="list">{html.definitions(config, changed)}</dl>',
        f'<h2>Environment</h2><dl class="list environment">{html.definitions(environment)}</dl>',
    ]
    page = html.PAGE.substitute(title=escape(folder.resolve().name), body="\n".join(body))
    # A path among the knobs may hold bytes that are not text: they are shown as `\udcff`.
    write_text(folder / "report.html", page)


def curve(rows: Rows, metric: str, unit: float = 1.0) -> list[tuple[float, float]]:
    """Epochs and values of a metric, in units of `unit`; anything but numbers is left out."""

    def is_number(value: object) -> bool:
        return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)

    pairs = ((row.get("epoch"), row.get(metric)) for row in rows)
    return [(epoch, y / unit) for epoch, y in pairs if is_number(epoch) and is_number(y)]


def summary(rows: Rows, confusion: Tensor, calibration: Calibration) -> str:
    """The result in a few numbers, the most important first."""
    right, count = int(confusion.diagonal().sum()), int(confusion.sum())
    found = {f"top-1: {right:,} of {count:,} validation images": f"{right / count:.2%}"}
    if top1 := curve(rows, "val/top1"):
        epoch, best = max(top1, key=lambda point: point[1])
        if best > top1[-1][1]:
            found[f"best top-1, at epoch {epoch:g}"] = f"{best:.2%}"

    for name, metric, form, of in FACTS:
        if values := [value for _, value in curve(rows, metric)]:
            found[name] = form.format(of(values))
    found["calibration error"] = f"{calibration.error:.1%}"
    return "".join(f"<div><dd>{value}</dd><dt>{what}</dt></div>" for what, value in found.items())


def curves(rows: Rows) -> str:
    """Charts of loss, accuracy, learning rate and throughput."""
    charts = []
    for title, metrics, options in CHARTS:
        unit = 0.01 if options.get("unit") == "%" else 1.0
        names = [metric.partition("/")[0] for metric in metrics]
        lines = [
            html.Line(name, curve(rows, metric, unit), name)
            for name, metric in zip(names, metrics, strict=True)
        ]
        charts.append(html.line_chart(title, lines, **options))
    return "".join(charts)


def calibration_section(calibration: Calibration) -> str:
    """Whether the model is over- or underconfident: a sentence and a diagram."""
    count = float(calibration.counts.sum())
    if not count:
        return "<p>No prediction has a probability.</p>"
    said = float(calibration.counts @ calibration.confidence) / count
    right = float(calibration.counts @ calibration.accuracy) / count
    noise = 2 * sqrt(right * (1 - right) / count)  # two standard errors
    verdict = "neither over- nor underconfident"
    if abs(said - right) > max(noise, 0.005):
        kind = "overconfident" if said > right else "underconfident"
        verdict = f"{kind} by {100 * abs(said - right):.1f} points"
    return (
        f'<div class="reliability">{html.reliability_diagram(calibration)}<p>Mean confidence '
        f"{said:.1%}, accuracy {right:.1%}: {verdict}. Expected calibration error (ECE): "
        f"{calibration.error:.1%}.</p></div>"
    )


def gallery(predictions: Predictions, indices: list[int]) -> str:
    """Images with their predicted and, where that is another, true class."""
    source, pictures = predictions.source, []
    for index in indices:
        predicted, target = int(predictions.predicted[index]), int(source.labels[index])
        shares = predictions.probability[index], predictions.target_probability[index]
        percent, percent_of_target = (percentage(float(share)) for share in shares)
        lines = [("true", source.classes[target], percent_of_target)]
        if predicted != target:
            lines.insert(0, ("wrong-class", source.classes[predicted], percent))
        title = f"image {index}"
        if source.paths is not None:
            title = source.paths.relative(index).decode("utf-8", "backslashreplace")
        pictures.append(html.Picture(read_image(source, index), title, lines))
    return html.gallery(pictures) if pictures else "<p>None.</p>"


def augmented(samples: Samples, classes: tuple[str, ...]) -> str:
    """Training images as the model saw them, with the shares of mixed labels."""
    pictures = []
    for pixels, label in zip(samples.pixels.cpu(), samples.labels.cpu(), strict=True):
        lines = [("true", classes[int(label)], "")] if label.ndim == 0 else []
        if label.ndim:
            shares = sorted(((float(label[n]), int(n)) for n in label.nonzero()), reverse=True)
            lines = [("true", classes[n], percentage(share)) for share, n in shares]
        pictures.append(html.Picture(pixels, f"step {samples.step}", lines))
    note = f"As the model saw them in step {samples.step:,}."
    return f"<h2>Augmented training images</h2><p>{note}</p>{html.gallery(pictures)}"


def percentage(share: float) -> str:
    """A fraction in percent, with a decimal where it would otherwise be shown as 0 or 100."""
    percent = f"{share:.0%}"
    return f"{share:.1%}" if percent in ("0%", "100%") else percent


def read_image(source: Source, index: int) -> Tensor | None:
    """The whole image `index`; None if it cannot be read any more."""
    try:
        return source.read(index)
    except (UserError, FaultError):
        return None
