"""The page of a run: one HTML file that needs neither a network nor scripts.

To add a section: a function that returns HTML, and its place in `write_page`. Text from outside,
such as the name of a class, passes through `escape`.
"""

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from math import sqrt
from pathlib import Path
from statistics import fmean, median

import numpy as np
from torch import Tensor

from ...config import Config, flatten
from ...data import Batch
from ...predictions import Answers, Calibration, calibrate
from ...runtime.files import read_object, read_rows
from ...runtime.run_dir import write_text
from ..html.charts import Line, Rows, chart, curve, reliability
from ..html.pictures import (
    Picture,
    contact_sheet,
    gallery,
    names_in,
    place_of,
    read_small,
    share_text,
)
from ..html.style import PAGE
from ..html.tables import class_table, confused_pairs, listing, matrix

PICTURES = 24  # in each gallery
MOST_SHARE = 0.02  # of a run's time that its page may take before the end
USUAL_SECONDS = 0.5  # that it takes to write one, as long as none was written
STATE = re.compile('(?<=<p class="state">)[^<]*')

Augment = Callable[[Batch, int], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Seen:
    """Training images as the model saw them, on the device."""

    step: int
    pixels: Tensor  # (count, height, width, 3) uint8
    labels: Tensor  # (count,) int64, or (count, classes) float32 if they are mixed


class Page:
    """`report.html` of a run, written anew as the run goes on, if that takes little of its time."""

    def __init__(self, folder: Path) -> None:
        """In the run folder; nothing is written yet."""
        self.path = folder / "report.html"
        self.seen: Seen | None = None
        self.warnings: list[str] = []
        self.written, self.took_seconds = time.monotonic(), USUAL_SECONDS

    def look_on(self, augment: Augment, pixels_of: Callable[[Tensor], Tensor]) -> Augment:
        """`augment`; some of what comes of the first batch is kept, to be shown.

        `pixels_of` makes pixels of normalised images again.
        """

        def apply(batch: Batch, step: int) -> tuple[Tensor, Tensor]:
            images, labels = augment(batch, step)
            if self.seen is None:  # nothing here waits for the device
                some = pixels_of(images[:PICTURES]).permute(0, 2, 3, 1)
                self.seen = Seen(step + 1, some, labels[:PICTURES].clone())
            return images, labels

        return apply

    @property
    def is_due(self) -> bool:
        """Whether to write it anew would take little of the time since it was written."""
        return self.took_seconds <= MOST_SHARE * (time.monotonic() - self.written)

    def write(self, answers: Answers, state: str) -> None:
        """Write it anew; `state` says how the run stands.

        Raises:
            OSError: if it can't be written; the one before is kept.
        """
        began = time.monotonic()
        write_page(self.path.parent, answers, state, self.seen, self.warnings)
        self.written = time.monotonic()
        self.took_seconds = self.written - began

    def sheets(self, answers: Answers) -> dict[str, np.ndarray]:
        """The pictures of mistakes and of training images, each kind as one: for trackers."""
        mistakes = (read_small(answers.source, index) for index in answers.worst(PICTURES))
        sheets = {"mistakes": [picture for picture in mistakes if picture is not None]}
        if self.seen is not None:
            sheets["training images"] = list(self.seen.pixels.cpu())
        return {name: contact_sheet(pictures) for name, pictures in sheets.items() if pictures}

    def restate(self, state: str) -> None:
        """Change nothing but how the run stands, if there is a page.

        Raises:
            OSError: if it can't be written; the one before is kept.
        """
        if self.path.exists():
            text = self.path.read_text(encoding="utf-8", errors="replace")
            write_text(self.path, STATE.sub(lambda _: escape(state), text, count=1))


def write_page(
    folder: Path,
    answers: Answers,
    state: str = "",
    seen: Seen | None = None,
    warnings: Sequence[str] = (),
) -> None:
    """Write `report.html` from what a run wrote to `folder` and its last evaluation."""
    rows = read_rows(folder / "metrics.jsonl")
    config, environment = (read_object(folder / f"{n}.json") for n in ("config", "environment"))
    classes, confusion = answers.source.classes, answers.confusion()
    confusions = matrix if len(classes) <= 20 else confused_pairs  # a larger one can't be read
    calibration = calibrate(answers)
    about = f"{config['model.name']} on {config['data.name']}, {config['epochs']:g} epochs; "
    about += environment["device"]
    defaults = json.loads(json.dumps(flatten(Config())))  # as JSON has them: lists for tuples
    changed = [knob for knob in config.items() if knob not in defaults.items()]
    body = [
        f"<h1>{escape(folder.resolve().name)}</h1><p>{escape(about)}</p>",
        f'<p class="state">{escape(state)}</p>',
        f'<dl class="facts">{facts(rows, confusion, calibration)}</dl>',
        f"<section><h2>Warnings</h2>{warned(warnings)}</section>" if warnings else "",
        f'<div class="curves">{curves(rows)}</div>',
        '<div class="beside">',
        f"<section><h2>Confusion</h2>{confusions(classes, confusion)}</section>",
        f"<section><h2>Classes</h2>{class_table(classes, confusion)}</section>",
        "</div>",
        f"<h2>Calibration</h2>{trust(calibration)}",
        f"<h2>Worst mistakes</h2>{mistaken(answers)}",
        f"<h2>Least certain</h2>{uncertain(answers)}",
        "" if seen is None else f"<h2>Training images</h2>{learned(seen, classes)}",
        "<h2>Config</h2><p>Bold: other than the default.</p>",
        f'<dl class="list">{listing(config, changed)}</dl>',
        f'<h2>Environment</h2><dl class="list environment">{listing(environment)}</dl>',
    ]
    page = PAGE.substitute(title=escape(folder.resolve().name), body="\n".join(body))
    # A path among the knobs may hold bytes that are no text: they are shown as `\udcff`.
    write_text(folder / "report.html", page)


def warned(warnings: Sequence[str]) -> str:
    """What the run said that is most likely wrong, a paragraph for each."""
    return "".join(f'<p class="warning">{escape(line)}</p>' for line in warnings)


def facts(rows: Rows, confusion: Tensor, calibration: Calibration) -> str:
    """The result in a few numbers, the most important first."""
    right, count = int(confusion.diagonal().sum()), int(confusion.sum())
    found = {f"top-1: {right:,} of {count:,} validation images": f"{right / count:.2%}"}
    if top1 := curve(rows, "val/top1"):
        epoch, best = max(top1, key=lambda point: point[1])
        if best > top1[-1][1]:
            found[f"best top-1, at epoch {epoch:g}"] = f"{best:.2%}"
        if top5 := curve(rows, "val/top5"):
            found["top-5"] = f"{top5[-1][1]:.2%}"
        found["validation loss"] = f"{curve(rows, 'val/loss')[-1][1]:.4f}"
    found["calibration error"] = f"{calibration.error:.1%}"
    if rates := curve(rows, "train/images_per_second"):
        waits = curve(rows, "train/waited_fraction")
        found["images per second"] = f"{median(rate for _, rate in rates):,.0f}"
        found["waiting for data"] = f"{fmean(share for _, share in waits):.1%}"
    found |= cost_facts(rows)
    return "".join(f"<div><dd>{value}</dd><dt>{what}</dt></div>" for what, value in found.items())


def cost_facts(rows: Rows) -> dict[str, str]:
    """How well the device was used, and the energy that it took, as far as that is known."""
    found = {}
    if shares := curve(rows, "train/mfu"):
        found["of the device's peak (MFU)"] = f"{median(share for _, share in shares):.1%}"
    if used := curve(rows, "device/utilisation"):
        found["device busy"] = f"{fmean(share for _, share in used):.0%}"
    if energy := curve(rows, "energy_joules"):
        found["energy"] = f"{energy[-1][1] / 3600:,.4g} Wh"
    return found


def curves(rows: Rows) -> str:
    """Charts of what was learned, and of how fast it was."""
    train, val = curve(rows, "train/loss"), curve(rows, "val/loss")
    waited = curve(rows, "train/waited_fraction", scale=100)
    return (
        chart("Loss", [Line("train", train, "train"), Line("val", val)])
        + chart("Validation top-1", [Line("val", curve(rows, "val/top1", scale=100))], unit="%")
        + chart("Learning rate", [Line("train", curve(rows, "train/lr"), "train")])
        + chart(
            "Images per second",
            [Line("train", curve(rows, "train/images_per_second"), "train")],
            low=0,
        )
        + chart("Time spent waiting for data", [Line("train", waited, "train")], unit="%", low=0)
    )


def trust(calibration: Calibration) -> str:
    """How far the probabilities can be trusted: a sentence and a drawing."""
    if not calibration.count:
        return "<p>No answer has a probability.</p>"
    said, right = calibration.mean(calibration.said), calibration.mean(calibration.right)
    chance = 2 * sqrt(right * (1 - right) / calibration.count)  # that `right` may be off by
    gap = 100 * abs(said - right)
    if abs(said - right) <= max(chance, 0.005):
        sentence = "neither over- nor underconfident."
    elif said > right:
        sentence = f"overconfident by {gap:.1f} points."
    else:
        sentence = f"underconfident by {gap:.1f} points: right more often than it says."
    return (
        f'<div class="reliability">{reliability(calibration)}<p>The model says {said:.1%} on the '
        f"average and is right in {right:.1%}: {sentence} "
        f"Bin by bin the two differ by {calibration.error:.1%} (ECE).</p></div>"
    )


def mistaken(answers: Answers) -> str:
    """The wrong answers that the model was surest of, as pictures."""
    worst = answers.worst(PICTURES)
    if not worst:
        return "<p>None.</p>"
    note = "What the model was surest of, and wrong: in colour its answer, below it the truth. "
    note += "Some may be mistakes of the labels."
    return f"<p>{note}</p>{gallery(answer_picture(answers, index) for index in worst)}"


def uncertain(answers: Answers) -> str:
    """The answers that the model was least sure of, as pictures."""
    note = "Answers with the lowest probability, right or wrong."
    least = answers.least_certain(PICTURES)
    return f"<p>{note}</p>{gallery(answer_picture(answers, index) for index in least)}"


def answer_picture(answers: Answers, index: int) -> Picture:
    """An image with its answer and, where that is another, the truth."""
    source, answer = answers.source, int(answers.answer[index])
    truth = int(source.labels[index])
    share, share_of_truth = (
        share_text(float(shares[index]))
        for shares in (answers.probability, answers.probability_of_truth)
    )
    lines = [("true" if answer == truth else "said", source.classes[answer], share)]
    if answer != truth:
        lines.append(("true", source.classes[truth], share_of_truth))
    return Picture(read_small(source, index), place_of(source, index), lines)


def learned(seen: Seen, classes: tuple[str, ...]) -> str:
    """Training images as the model saw them."""
    pictures = (
        Picture(
            pixels,
            f"step {seen.step}",
            [("seen", name, share) for name, share in names_in(label, classes)],
        )
        for pixels, label in zip(seen.pixels.cpu(), seen.labels.cpu(), strict=True)
    )
    note = f"As the model saw them in step {seen.step:,}, augmented{mixing(seen.labels.cpu())}."
    return f"<p>{note}</p>{gallery(pictures)}"


def mixing(labels: Tensor) -> str:
    """How a step mixed its images, by labels of some: nothing if it did not.

    In one step all pairs are mixed in the same way; of two images of one class that can't be seen.
    """
    if labels.ndim == 1:
        return ""
    most = float(labels.max(dim=1).values.min())  # of the pair that is mixed most visibly
    return " and mixed in pairs" + (f", {most:.1%} and {1 - most:.1%}" if most < 1 else "")
