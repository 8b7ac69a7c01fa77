"""The page that a run ends with: one HTML file that needs neither a network nor scripts.

To add a section: a function that returns HTML, and its place in `PAGE`. Text from outside, such as
the name of a class, passes through `escape`.
"""

import json
import math
import shlex
from collections.abc import Collection, Sequence
from html import escape
from pathlib import Path
from statistics import fmean, median
from string import Template
from typing import Any

from torch import Tensor

from .config import Config, flatten
from .run import write_whole

Rows = list[dict[str, float]]
Curve = list[tuple[float, float]]  # epoch and value

LEFT, RIGHT, TOP, BOTTOM = 44, 262, 8, 174  # of what a chart encloses, in pixels


def write_page(folder: Path, classes: tuple[str, ...], confusion: Tensor) -> None:
    """Write `report.html` from what a run wrote to `folder` and its last evaluation.

    `confusion` is (classes, classes) int64: row is the truth, column the answer.
    """
    files = ("metrics.jsonl", "config.json", "environment.json")
    metrics, *others = ((folder / name).read_text(encoding="utf-8") for name in files)
    rows = [json.loads(line) for line in metrics.splitlines()]
    config, environment = map(json.loads, others)
    defaults = json.loads(json.dumps(flatten(Config())))  # as JSON has them: lists for tuples
    confusions = matrix if len(classes) <= 20 else confused_pairs  # a larger one can't be read
    page = PAGE.substitute(
        title=escape(folder.resolve().name),
        about=escape(
            f"{config['model.name']} on {config['data.name']}, {config['epochs']:g} epochs; "
            f"{environment['device']}"
        ),
        facts=facts(rows, confusion),
        curves=curves(rows),
        confusion=confusions(classes, confusion),
        classes=class_table(classes, confusion),
        config=listing(
            config, changed=[knob for knob in config.items() if knob not in defaults.items()]
        ),
        environment=listing(environment),
    )
    # A path among the knobs may hold bytes that are no text: they are shown as `\udcff`.
    content = page.encode("utf-8", "backslashreplace")
    write_whole(folder / "report.html", lambda file: file.write(content))


def curve(rows: Rows, metric: str) -> Curve:
    """A metric over the run, where it was logged."""
    return [(row["epoch"], row[metric]) for row in rows if metric in row]


def facts(rows: Rows, confusion: Tensor) -> str:
    """The result in a few numbers, the most important first."""
    right, count = int(confusion.diagonal().sum()), int(confusion.sum())
    found = {f"top-1: {right:,} of {count:,} validation images": f"{right / count:.2%}"}
    if top1 := curve(rows, "val/top1"):
        epoch, best = max(top1, key=lambda point: point[1])
        if best > top1[-1][1]:
            found[f"best top-1, at epoch {epoch:g}"] = f"{best:.2%}"
        found["top-5"] = f"{curve(rows, 'val/top5')[-1][1]:.2%}"
        found["validation loss"] = f"{curve(rows, 'val/loss')[-1][1]:.4f}"
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
    """Charts of what was learned, and of how fast it might be."""
    losses = {"train": curve(rows, "train/loss"), "val": curve(rows, "val/loss")}
    top1 = [(epoch, 100 * share) for epoch, share in curve(rows, "val/top1")]
    return (
        chart("Loss", losses)
        + chart("Validation top-1", {"val": top1}, unit="%")
        + chart("Learning rate", {"train": curve(rows, "train/lr")})
    )


def chart(title: str, lines: dict[str, Curve], unit: str = "") -> str:
    """Curves over the epochs, each with its last value; what is not finite is left out."""
    finite = {name: [p for p in line if math.isfinite(p[1])] for name, line in lines.items()}
    finite = {name: line for name, line in finite.items() if line}
    if not finite:
        return ""
    epochs, values = zip(*(point for line in finite.values() for point in line), strict=True)
    last, levels = max(epochs) or 1.0, ticks(min(values), max(values))

    def across(epoch: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * epoch / last, 1)

    def down(value: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * (value - levels[0]) / (levels[-1] - levels[0]), 1)

    parts = [
        f'<path d="M{LEFT} {down(level)}H{RIGHT}"/>'
        f'<text class="level" x="{LEFT - 6}" y="{down(level) + 4}">{level:g}{unit}</text>'
        for level in levels
    ]
    parts += [
        f'<text class="epoch" x="{across(epoch)}" y="{BOTTOM + 18}">{epoch:g}</text>'
        for epoch in ticks(0, last)
        if epoch <= last
    ]
    parts.append(f'<text x="{RIGHT + 20}" y="{BOTTOM + 18}">epoch</text>')
    free = BOTTOM + 18.0  # labels go from the lowest up, each above the one before
    for name, line in sorted(finite.items(), key=lambda item: item[1][-1][1]):
        x, y = across(line[-1][0]), down(line[-1][1])
        free = min(free - 14, y + 4)
        points = " ".join(f"{across(epoch)},{down(value)}" for epoch, value in line)
        label = f"{name if len(lines) > 1 else ''} {lines[name][-1][1]:.4g}{unit}"
        parts.append(
            f'<g class="{name}"><polyline points="{points}"/><circle cx="{x}" cy="{y}" r="2.5"/>'
            f'<text x="{RIGHT + 8}" y="{free}">{label}</text></g>'
        )
    drawing = f'<svg viewBox="0 0 352 196" role="img" aria-label="{title}">{"".join(parts)}</svg>'
    return f"<figure><figcaption>{title}</figcaption>{drawing}</figure>"


def ticks(low: float, high: float) -> list[float]:
    """A few round numbers, evenly spaced, that `low` and `high` lie between."""
    if math.isclose(low, high, rel_tol=1e-4):
        low, high = min(low, 0.0), max(high, 0.0) or 1.0
    least = 0.999 * (high - low) / 4
    power = 10.0 ** math.floor(math.log10(least))
    step = next(power * n for n in (1, 2, 5, 10) if power * n >= least)
    return [step * n for n in range(math.floor(low / step), math.ceil(high / step) + 1)]


def matrix(classes: tuple[str, ...], confusion: Tensor) -> str:
    """Every class against every class."""
    names = [escape(name) for name in classes]
    shares = confusion / confusion.sum(1, keepdim=True)
    shades = shares.sqrt().tolist()  # the root: a mistake of one percent is to be seen too
    heads = "".join(f'<th scope="col" title="{name}"><span>{name}</span></th>' for name in names)
    lines = [f"<tr><td></td>{heads}</tr>"]
    for truth, counts in enumerate(confusion.tolist()):
        cells = "".join(
            f'<td class="{"right" if answer == truth else "wrong"}" '
            f'style="--shade:{shades[truth][answer]:.0%}" '
            f'title="{names[truth]} taken for {names[answer]}">{count:,}</td>'
            if count
            else "<td></td>"
            for answer, count in enumerate(counts)
        )
        head = f'<th scope="row" title="{names[truth]}">{names[truth]}</th>'
        lines.append(f"<tr>{head}{cells}</tr>")
    note = "Images of the class on the left that were taken for the class at the top."
    return f'<p>{note}</p><div class="wide"><table class="matrix">{"".join(lines)}</table></div>'


def confused_pairs(classes: tuple[str, ...], confusion: Tensor, most: int = 30) -> str:
    """The pairs of classes that are mistaken most often."""
    counts, places = mistakes(confusion).flatten().topk(most)
    images = confusion.sum(1).tolist()
    pairs = []
    for count, place in zip(counts.tolist(), places.tolist(), strict=True):
        truth, answer = divmod(place, len(classes))
        if count:
            pairs.append((classes[truth], classes[answer], count, count / images[truth]))
    return table(("class", "taken for", "times", "share"), pairs) if pairs else "<p>None.</p>"


def class_table(classes: tuple[str, ...], confusion: Tensor) -> str:
    """How well each class is recognised: the worst first, those without images last."""
    right, images = confusion.diagonal(), confusion.sum(1)
    times, answers = mistakes(confusion).max(1)
    taken_for = [classes[n] if count else "" for n, count in zip(answers, times, strict=True)]
    tensors = (right / images, right / confusion.sum(0), images)
    columns = (classes, *(tensor.tolist() for tensor in tensors), taken_for, times.tolist())
    rows = sorted(zip(*columns, strict=True), key=lambda row: (row[3] == 0, row[1], row[0]))
    return table(("class", "recall", "precision", "images", "most often taken for", "times"), rows)


def mistakes(confusion: Tensor) -> Tensor:
    """The confusion matrix without the right answers."""
    return confusion - confusion.diagonal().diag()


def table(heads: tuple[str, ...], rows: Sequence[tuple[str | float, ...]]) -> str:
    """A table of text, counts (int) and shares (float; nan is left empty)."""

    def cell(value: str | float) -> str:
        if isinstance(value, str):
            return f"<td>{escape(value)}</td>"
        number = f"{value:,}" if isinstance(value, int) else f"{value:.1%}"
        return f'<td class="number">{"" if math.isnan(value) else number}</td>'

    kinds = ["" if isinstance(value, str) else ' class="number"' for value in rows[0]]
    head = "".join(f"<th{kind}>{name}</th>" for kind, name in zip(kinds, heads, strict=True))
    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    return f'<div class="long"><table><thead><tr>{head}</tr></thead>{body}</table></div>'


def listing(values: dict[str, Any], changed: Collection[tuple[str, Any]] = ()) -> str:
    """Names with their values; the pairs in `changed` stand out."""
    lines = []
    for name, value in values.items():
        text = shlex.join(value) if isinstance(value, list) else value
        text = text if isinstance(text, str) else json.dumps(text)
        mark = ' class="changed"' if (name, value) in changed else ""
        lines.append(f"<div{mark}><dt>{escape(name)}</dt><dd>{escape(text) or '-'}</dd></div>")
    return "".join(lines)


# The policy lets nothing run or be fetched, whatever may get through as HTML one day.
PAGE = Template("""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>$title</title>
<style>
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1f24; --soft: #66707b;
  --line: #e2e6ea; --val: #1f66b5; --right: #8ebdf0; --wrong: #f0a873; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171a; --ink: #e3e7eb; --soft: #939da7;
    --line: #2b3138; --val: #6fb0f5; --right: #2a5f9c; --wrong: #9a5325; }
}
* { box-sizing: border-box; margin: 0; }
body { max-width: 72rem; margin: auto; padding: 2.5rem 1.25rem; background: var(--paper);
  color: var(--ink); font: 0.875rem/1.5 system-ui, sans-serif; font-variant-numeric: tabular-nums; }
h1 { line-height: 1.2; overflow-wrap: anywhere; }
h2 { margin: 3rem 0 0.5rem; font-size: 1rem; }
p { margin: 0.25rem 0 0.75rem; overflow-wrap: anywhere; }
p, dt, th, figcaption { color: var(--soft); font-weight: normal; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(10rem, 1fr)); gap: 1rem;
  margin-top: 1.5rem; }
.facts dd { margin-top: 0.5rem; font-size: 1.25rem; line-height: 1.2; }
.facts > :first-child { grid-column: 1 / -1; }
.facts > :first-child dd { font-size: 3rem; font-weight: 600; }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(19rem, 1fr)); gap: 1.5rem;
  margin-top: 2.5rem; }
svg { width: 100%; margin-top: 0.5rem; overflow: visible; font-size: 11px; fill: var(--soft);
  stroke: var(--line); }
svg text { stroke: none; }
.level { text-anchor: end; }
.epoch { text-anchor: middle; }
.train { stroke: var(--soft); fill: var(--soft); }
.val { stroke: var(--val); fill: var(--val); }
polyline { fill: none; stroke-width: 1.5; stroke-linejoin: round; }
.beside { display: flex; flex-wrap: wrap; column-gap: 4rem; }
section { max-width: 100%; }
.wide, .long { overflow: auto; }
.long { max-height: 42rem; }
table { border-collapse: collapse; }
th, td { max-width: 18rem; padding: 0.2rem 0 0.2rem 1rem; text-align: left; }
th:first-child, td:first-child { padding-left: 0; }
td { border-top: 1px solid var(--line); overflow-wrap: break-word; }
thead th { position: sticky; top: 0; max-width: 7rem; background: var(--paper); }
.number { text-align: right; white-space: nowrap; }
.matrix th, .matrix td { padding: 0 0.2rem; border: 1px solid var(--paper); text-align: center; }
.matrix th, .matrix span { max-width: 9rem; overflow: hidden; text-overflow: ellipsis; }
.matrix th { vertical-align: bottom; white-space: nowrap; }
.matrix [scope=row] { position: sticky; left: 0; background: var(--paper);
  vertical-align: middle; text-align: right; }
.matrix td { min-width: 1.8rem; height: 1.8rem; font-size: 0.75rem; }
.matrix span { display: inline-block; max-height: 9rem; writing-mode: vertical-rl;
  text-orientation: sideways; rotate: 180deg; }
.right { background: color-mix(in srgb, var(--right) var(--shade), var(--paper)); }
.wrong { background: color-mix(in srgb, var(--wrong) var(--shade), var(--paper)); }
.list { columns: 19rem; column-gap: 2.5rem; }
.list div { display: flex; gap: 1rem; border-top: 1px solid var(--line); break-inside: avoid; }
.list dd { margin-left: auto; overflow-wrap: anywhere; white-space: pre-wrap; }
.list .changed dd { font-weight: 600; }
.environment { columns: 1; }
.environment dt { flex: 0 0 6rem; }
.environment dd { margin: 0; }
@media (max-width: 30rem) {
  th, td { padding-left: 0.5rem; font-size: 0.75rem; }
  .matrix th { max-width: 5rem; }
  .matrix td { min-width: 1.6rem; padding: 0; }
}
</style>
<h1>$title</h1>
<p>$about</p>
<dl class="facts">$facts</dl>
<div class="curves">$curves</div>
<div class="beside">
<section><h2>Confusion</h2>$confusion</section>
<section><h2>Classes</h2>$classes</section>
</div>
<h2>Config</h2>
<p>Bold: other than the default.</p>
<dl class="list">$config</dl>
<h2>Environment</h2>
<dl class="list environment">$environment</dl>
</html>
""")
