"""Measure again what the README and docs/ show: one commit, one machine, one command.

    make measure                                            # on generated images
    make measure WORDS='--flowers flowers --trash trash'    # all of it: up to an hour
    make measure WORDS='--long --flowers flowers --trash trash --aerial aerial --timm timm'
    make measure WORDS='--long --only suites search'
    make measure WORDS=--amx                                # beside those of another CPU

`--list` prints the commands. With `--long` they are those that take hours: fine-tuning, scores to
trust, search, presets, tests; `--only` names some. What needs images that are not given is left
out, and keeps its result and its date; results of a GPU are those of `gpu.py`.

Nothing else runs on the machine, and all changes are committed. Results are in `build/measured`
until the end: a command whose result is there, and not stale, is not run again. At the end they
are copied into `results/`, and `figures.py` writes the pages. Needs uv; makes `build/peers`, an
environment with all peers (UV_TORCH_BACKEND=cpu: without CUDA).
"""

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import measurements
from figures import clock
from measurements import PROJECT, ROOT

PEERS = ROOT / "build" / "peers"
MEASURED = ROOT / "build" / "measured"
MOST_LOAD = 0.5  # of other processes, before the first command
SETS = ("aerial", "cifar", "flowers", "scenes", "timm", "trash")
FLOWERS = "--root {flowers} --scratch build/scratch-flowers"
FEW = "pil-v1 timm spdl-v2 dali ours ours-prepared-jpeg ours-prepared-raw bare bare-prepared-raw"
LOOPS = "examples timm lightning ours-streamed ours"

# A result, and the script that writes it, with its options.
QUICK = [
    ("loaders-pixels", "loaders --pixels --scratch build/scratch"),
    ("loaders", "loaders --rounds 3 --images 1536 --scratch build/scratch"),
    ("training", f"training --rounds 2 --steps 20 --only {LOOPS}"),
    ("resident", "resident --rounds 3 --seconds 5"),
    ("policies", "policies --rounds 2 --seconds 2"),
    ("overhead", "overhead --rounds 3 --blocks 40"),
    ("recipes-shapes", "recipes --only shapes --rounds 2"),
    ("input_formats", "input_formats --rounds 2"),
    ("scale", "scale"),
    ("model_parallel", "model_parallel"),
    ("memory", "memory --rounds 1"),
    ("loaders-flowers-pixels", f"loaders --pixels {FLOWERS}"),
    ("loaders-flowers", f"loaders --rounds 2 --images 1536 {FLOWERS} --only {FEW}"),
    ("near_duplicates", "near_duplicates --files {flowers} {trash}"),
]
LONG = [
    (
        "transfer",
        "transfer --sets {trash} {aerial} {flowers} {scenes}/labels.csv --timm {timm}"
        " --images 150 --validation 120",
    ),
    ("trust-labels", "trust --rounds 2 --only labels --trash {trash} --flowers {flowers}"),
    ("trust-folds", "trust --only folds:trash:probe --trash {trash}"),
    ("trust-turns", "trust --rounds 4 --only turns:aerial:finetune --aerial {aerial}"),
    ("trust-bursts", "trust --only bursts"),
    ("trust-test", "trust --only test --aerial {aerial}"),
    ("search", "search --folder build/search"),
    ("recipes-folder", "recipes --only folder --flowers {flowers} --rounds 2"),
    ("recipes-cifar10_speed", "recipes --only cifar10_speed --cifar {cifar} --rounds 2"),
    ("precision", "precision"),
    ("suites", "suites"),
]
AMX = [
    ("loaders-amx", "loaders --rounds 3 --images 1536 --scratch build/scratch"),
    ("training-amx", f"training --rounds 3 --steps 40 --only {LOOPS} ours-fp32"),
]
OF_THIS_ENVIRONMENT = ("suites",)  # that of `make test`, without peers


def main() -> None:
    """Run what is not measured yet, and write the pages."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--long", action="store_true", help="what takes hours")
    parser.add_argument("--amx", action="store_true", help="what a CPU with AMX does otherwise")
    parser.add_argument("--list", action="store_true", help="print the commands, run nothing")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these results")
    for name in SETS:
        parser.add_argument(f"--{name}", type=Path, metavar="FOLDER")
    given = parser.parse_args()
    if given.amx and "amx_bf16" not in measurements.machine()["flags"]:
        parser.error("this CPU has no AMX")
    commands = dict(AMX if given.amx else LONG if given.long else QUICK)
    wanted = given.only or list(commands)
    if unknown := [name for name in wanted if name not in commands]:
        known = ", ".join(commands)
        parser.error(f"no result of this list is called {unknown[0]}; there are {known}")
    paths = {name: path.resolve() for name, path in vars(given).items() if name in SETS and path}
    rows = [
        (name, commands[name].format_map(paths))
        for name in wanted
        if not {*re.findall(r"{(\w+)}", commands[name])} - paths.keys()
    ]
    if given.list:
        print("\n".join(f"{name:<24} {words}" for name, words in rows))
        return
    refuse_if_busy()
    make_peers()
    begun = time.monotonic()
    failed = [name for name, words in rows if not measure(name, words)]
    for path in filter(has_figures, MEASURED.glob("*.json")):
        shutil.copy(path, measurements.RESULTS)
    subprocess.run([sys.executable, "benchmarks/figures.py"], cwd=ROOT, check=True)
    print(f"{len(rows) - len(failed)} of {len(rows)} measured in {clock(time.monotonic() - begun)}")
    if failed:
        raise SystemExit(f"not measured: {', '.join(failed)}")


def refuse_if_busy() -> None:
    """End here if the figures would be of no commit, or of a machine that does something else."""
    if measurements.commit().endswith("-dirty"):
        raise SystemExit("a figure is of a commit: commit your changes first")
    if MOST_LOAD * measurements.machine()["cores"] < measurements.LOAD:
        raise SystemExit(f"the machine is busy: its load is {measurements.LOAD:.1f}")


def make_peers() -> None:
    """Make or complete the environment of the peers."""
    uv = shutil.which("uv")
    if uv is None:
        raise SystemExit("needs uv: https://docs.astral.sh/uv/")
    python = PEERS / "bin" / "python"
    if not python.exists():
        subprocess.run([uv, "venv", PEERS], check=True)
    words = ["--requirement", ROOT / "benchmarks" / "requirements.txt"]
    words += ["--requirement", PROJECT / "pyproject.toml", "--extra", "search"]
    subprocess.run([uv, "pip", "install", "--python", python, *words], check=True)


def measure(name: str, words: str) -> bool:
    """Run one script, unless its result is there and not stale; whether it is there then."""
    path = MEASURED / f"{name}.json"
    if has_figures(path) and not measurements.staleness(json.loads(path.read_text())):
        return True
    path.unlink(missing_ok=True)
    print(f"\n== {name}: {words}", flush=True)
    begun = time.monotonic()
    script, *options = shlex.split(words)
    python = sys.executable if script in OF_THIS_ENVIRONMENT else PEERS / "bin" / "python"
    folder = MEASURED / "amx" if name.endswith("-amx") else MEASURED
    command = [python, f"benchmarks/{script}.py", *options, "--results", folder]
    subprocess.run(command, cwd=ROOT, check=False)
    found = folder / f"{name.removesuffix('-amx')}.json"
    if found != path and found.exists():
        result = json.loads(found.read_text(encoding="utf-8"))
        result["title"] += ", on a CPU with AMX"
        path.write_text(measurements.as_text(result), encoding="utf-8")
        found.unlink()
    print(f"== {name}: {clock(time.monotonic() - begun)}", flush=True)
    return has_figures(path)


def has_figures(path: Path) -> bool:
    """Whether a result is there, and not all that it compares has failed."""
    return path.exists() and bool(json.loads(path.read_text(encoding="utf-8"))["measured"])


if __name__ == "__main__":
    main()
