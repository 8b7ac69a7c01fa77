"""What ASHA saves: a grid of 12 learning rates, with bad trials ended early, against all in full.

    python benchmarks/search.py --folder build/search       # killed, it goes on there

Both are the command `search` on `shapes` as it is, with ASHA's own rungs: at a ninth and at a third
of each trial. They try the same learning rates, in an order of the seed; a round is a seed, for the
order as for the weights. Steps are counted and not seconds, so that nothing depends on what else
the machine does; each trial also costs a process's start.

Prints and writes `results/search.json`.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import measurements
import rounds

ABOUT = "augment data evaluate models optim presets pace parallel train"
ABOUT += " tools/runs/child_runs tools/search"
SEARCH = "shapes --space lr --search grid --trials 12 --run.trackers --max-concurrent 2"
SEARCH += " --precision bf16"  # else each machine measures which is faster
SCHEDULERS = {"all in full": "none", "asha": "asha"}
FIRST_SEED = 10


def main() -> None:
    """Search with each seed and scheduler, and write the result."""
    parser = rounds.parser(__doc__, rounds=3)
    parser.add_argument("--folder", type=Path, required=True, help="where the searches are kept")
    given = parser.parse_args()
    if given.contender:
        rounds.give(contend, given)
        return
    results, failures = rounds.compare(__file__, SCHEDULERS, given)
    full, early = (results.get(name, []) for name in SCHEDULERS)
    measurements.relate(results, "steps", ["asha"], "all in full")
    for one, other in zip(early, full, strict=False):
        one["points_below"] = other["top1_percent"] - one["top1_percent"]
    measurements.write(
        given.results / "search.json",
        "What ASHA saves",
        f"`image-classifier search {SEARCH} --scheduler none` or `asha`, as often as there are "
        "rounds, with a seed each: the best top-1, its learning rate, and the steps of all trials. "
        "Medians (lowest to highest).",
        measurements.measured(results, failures, goals(early)),
    )


def goals(early: list[dict[str, float]]) -> list[dict[str, object]]:
    """What is asked of each seed, so of the worst one."""
    below, steps = (
        [max((one[key] for one in early), default=0.0)] * bool(early)
        for key in ("points_below", "steps x all in full")
    )
    return [
        measurements.goal(
            "points of top-1 below the best of the full grid, worst seed", "<= 0.5", below
        ),
        measurements.goal(
            "share of the full grid's training steps, worst seed", "<= 0.3333", steps
        ),
    ]


def contend(given: argparse.Namespace) -> dict[str, float]:
    """Search once, in a folder of its own."""
    scheduler = SCHEDULERS[given.contender]
    folder = given.folder.resolve() / f"{scheduler}-{given.round}"
    words = [*SEARCH.split(), "--scheduler", scheduler, "--seed", str(FIRST_SEED + given.round)]
    program = "import sys; from image_classifier.cli import main; sys.exit(main())"
    subprocess.run(
        [sys.executable, "-c", program, "search", *words, "--run.dir", str(folder)],
        env=os.environ | {"PYTHONPATH": str(measurements.PROJECT / "src")},
        stdout=sys.stderr,
        check=True,
    )
    found = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    trials = found["trials"]
    best = trials[found["best"]]
    return {
        "top1_percent": 100 * best["rows"][-1]["val/top1"],
        "lr": best["knobs"]["optim.lr"],
        "steps": sum(trial["steps"] for trial in trials),
        "trained_to_the_end": sum(trial["state"] == "done" for trial in trials),
    }


if __name__ == "__main__":
    main()
