"""One recipe over several seeds: what it reaches, and by how much that varies."""

from dataclasses import asdict

from ...metrics import find_metric, metric_title
from ...runtime.files import write_json
from .many_runs import as_json, mean_text, print_table, train_all
from .recipe import Recipe
from .saved_runs import grain_of
from .statistics import mean_of


def repeat(recipe: Recipe, count: int) -> None:
    """Train with `count` seeds, and print and write what the runs reach.

    Raises:
        UserError: if a run cannot be trained so.
        FaultError: if a run failed, or a signal ended this.
    """
    seeds = range(recipe.config.seed, recipe.config.seed + count)
    runs = train_all(recipe, {f"seed-{seed}": {"seed": seed} for seed in seeds})
    grain = grain_of(runs)
    metric = runs[0].metric
    scores = {metric: "score", f"last_{metric}": "last_score"}
    is_share = find_metric(metric).is_percent
    means = {
        name: mean_of([getattr(run, score) for run in runs], grain, is_share=is_share)
        for name, score in scores.items()
    }
    content = {
        "preset": recipe.preset,
        "runs": [{"seed": run.seed} | as_json(run) for run in runs],
        **{name: asdict(mean) for name, mean in means.items()},
    }
    write_json(recipe.folder / "results.json", content)
    print_table("seed", dict(zip(seeds, runs, strict=True)))
    for mean, of in zip(means.values(), ("best.pt", "the last weights"), strict=True):
        print(f"{metric_title(metric)} of {of} {mean_text(mean, f'{count} seeds', metric)}")
