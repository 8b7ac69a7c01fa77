"""The page of a search, `search.html`: one file that needs neither a network nor scripts.

Text from outside passes through `escape`.
"""

import warnings
from collections.abc import Sequence
from html import escape

import optuna
from ray.tune.search.optuna import OptunaSearch

from ...metrics import metric_number, metric_title, scale
from ..report.charts import PAGE, line_chart, parallel_coordinates
from .engines import Knobs, ends
from .results import Trial, table_of
from .spaces import Space

FEWEST = 5  # trials that can tell which knobs matter


def page_of(  # noqa: PLR0917 - what is on it
    title: str, about: str, trials: Sequence[Trial], best: Trial, space: Space, command: str
) -> str:
    """The page: the best trial, all trials over their knobs and over epochs, and a table."""
    evaluated = [trial for trial in trials if trial.rows]
    names = [f"{trial.number:03}" for trial in evaluated]
    knobs = list(dict.fromkeys(knob for trial in evaluated for knob in trial.knobs))
    axes = {knob: [trial.knobs.get(knob, "") for trial in evaluated] for knob in knobs}
    unit, points, _ = scale(best.metric)
    percent = "%" if points else ""
    what = metric_title(best.metric)
    axes[f"{what}, {percent}".strip(", ")] = [unit * trial.value for trial in evaluated]
    main = evaluated.index(best)
    scores, losses = (
        {
            f"{trial.number:03}": [(row["epoch"], unit * row[metric]) for row in trial.rows]
            for trial in evaluated
        }
        for metric, unit in ((f"val/{best.metric}", unit), ("val/loss", 1))
    )
    head, *rows = table_of(trials)
    heads = row_of(head, "th").replace(".", ".<wbr>")  # the names of knobs are long
    body = [
        f"<h1>{escape(title)}</h1><p>{escape(about)}</p>",
        f'<dl class="facts"><div><dd>{metric_number(best.metric, best.value)}</dd><dt>{what} of '
        f"trial {best.number:03}, the best: {escape(command)}</dt></div></dl>",
        "<h2>Trials</h2><p>In color the best. A line is a trial, and its result that of its best "
        "evaluation, whose weights best.pt has.</p>",
        parallel_coordinates("Knobs and result", axes, names, main),
        '<div class="curves">',
        line_chart(f"Validation {what}", scores, unit=percent, main=names[main]),
        line_chart("Validation loss", losses, main=names[main]),
        "</div>",
        "<h2>Importance</h2>",
        importance_section(importance_of(evaluated, space)),
        f'<h2>Table</h2><div class="wide"><table><thead>{heads}</thead>'
        f"{''.join(row_of(row, 'td') for row in rows)}</table></div>",
        *(
            f"<p>{trial.number:03} failed: {escape(trial.failed)}</p>"
            for trial in trials
            if trial.failed
        ),
    ]
    return PAGE.substitute(title=escape(title), body="\n".join(body))


def importance_of(trials: Sequence[Trial], space: Space) -> dict[str, float]:
    """Each knob's share of what tells good trials from others, by PED-ANOVA; {} where unknown.

    https://arxiv.org/abs/2304.10255: how differently the best quarter and all are distributed.
    """
    if callable(space) or len(trials) < FEWEST or not all(map(ends, space.values())):
        return {}
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    distributions = OptunaSearch.convert_search_space(space)
    study = optuna.create_study(direction="maximize")
    for trial in trials:
        knobs = {knob: trial.knobs[knob] for knob in distributions}
        for knob, found in distributions.items():  # six digits may be beyond a bound that has more
            if not isinstance(found, optuna.distributions.CategoricalDistribution):
                knobs[knob] = min(max(knobs[knob], found.low), found.high)
        study.add_trial(
            optuna.trial.create_trial(params=knobs, distributions=distributions, value=trial.score)
        )
    with warnings.catch_warnings():  # it is marked as experimental
        warnings.simplefilter("ignore")
        evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=0.25)
        return optuna.importance.get_param_importances(study, evaluator=evaluator)


def importance_section(importance: Knobs) -> str:
    """The importance of each knob as text."""
    if not importance:
        return f"<p>Not known: it needs {FEWEST} trials, and knobs with bounds of their own.</p>"
    shares = "".join(
        f"<div><dt>{escape(knob)}</dt><dd>{share:.0%}</dd></div>"
        for knob, share in importance.items()
    )
    return (
        "<p>How differently each knob is distributed in the best quarter of the trials and in all "
        f'of them (PED-ANOVA): a hint, of few trials.</p><dl class="list">{shares}</dl>'
    )


def row_of(cells: Sequence[str], tag: str) -> str:
    """A row of a table."""
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"
