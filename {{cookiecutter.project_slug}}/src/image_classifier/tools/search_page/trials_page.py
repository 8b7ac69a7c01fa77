"""The page of a search: its trials, how they learned, and which knobs matter."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

import optuna

from ...metrics import metric_title, scale
from ...runtime.console import say
from ...runtime.files import write_text
from ..report.charts import PAGE, line_chart
from ..search.engines import Distributions
from ..search.results import Trial, best_of
from .coordinates import parallel_coordinates

FEWEST = 5  # trials that can tell which knobs matter


def write_page(
    folder: Path, title: str, trials: Sequence[Trial], summary: str, space: Distributions
) -> None:
    """Write `search.html` to the folder of a search; `summary` is what the terminal shows."""
    path = folder / "search.html"
    write_text(path, page_of(title, trials, summary, importance_of(trials, space)))
    say(f"written: {path}")


def page_of(title: str, trials: Sequence[Trial], summary: str, importance: dict[str, float]) -> str:
    """`search.html`, which needs neither a network nor scripts.

    Text from outside passes through `escape`.
    """
    evaluated = [trial for trial in trials if trial.rows]
    best = best_of(trials)
    knobs = dict.fromkeys(knob for trial in evaluated for knob in trial.knobs)
    axes = {knob: [trial.knobs.get(knob, "") for trial in evaluated] for knob in knobs}
    unit, points, _ = scale(best.metric)
    percent = "%" if points else ""
    what = metric_title(best.metric)
    column = f"val/{best.metric}"
    axes[f"{what}, {percent}".strip(", ")] = [unit * trial.best[column] for trial in evaluated]
    curves = {
        f"{trial.number:03}": [(row["epoch"], unit * row[column]) for row in trial.rows]
        for trial in evaluated
    }
    shares = "".join(
        f"<div><dt>{escape(knob)}</dt><dd>{share:.0%}</dd></div>"
        for knob, share in importance.items()
    )
    body = [
        f'<h1>{escape(title)}</h1><div class="wide"><pre>{escape(summary)}</pre></div>',
        "<h2>Trials</h2><p>In color the best. A line is a trial, and its result that of best.pt; "
        "of one that was stopped, that of its best evaluation.</p>",
        parallel_coordinates("Knobs and result", axes, [*curves], evaluated.index(best)),
        line_chart(f"Validation {what}", curves, unit=percent, main=f"{best.number:03}"),
        "<h2>Importance</h2><p>How differently each knob is distributed in the best quarter of the "
        f"trials and in all of them (PED-ANOVA): a hint, of few trials. It needs {FEWEST} trials, "
        f'and bounds that depend on no other knob.</p><dl class="list">{shares}</dl>',
    ]
    return PAGE.substitute(title=escape(title), body="\n".join(body))


def importance_of(trials: Sequence[Trial], space: Distributions) -> dict[str, float]:
    """Each knob's share of what tells good trials from others, by PED-ANOVA; {} where unknown.

    https://arxiv.org/abs/2304.10255: how differently the best quarter and all are distributed.
    """
    evaluated = [trial for trial in trials if trial.rows]
    if callable(space) or len(evaluated) < FEWEST:
        return {}
    study = optuna.create_study(direction="maximize")
    for trial in evaluated:
        found = optuna.create_trial(params=trial.knobs, distributions=space, value=trial.score)
        study.add_trial(found)
    evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=0.25)
    return optuna.importance.get_param_importances(study, evaluator=evaluator)
