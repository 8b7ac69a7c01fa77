"""What was measured, as `results/NAME.json`: on which machine, by which command, of which code.

A result carries a digest of the code that it is about. When that code changes, the result is stale:
`figures.py` says so wherever it shows one of its figures.
"""

import ast
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from functools import cache
from math import floor, log10
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROJECT = ROOT / "{{cookiecutter.project_slug}}"
PACKAGE = PROJECT / "src" / "image_classifier"
RESULTS = ROOT / "benchmarks" / "results"
LIBRARIES = (
    *("torch", "torchvision", "numpy", "pillow", "simplejpeg"),
    *("timm", "lightning", "webdataset", "spdl", "nvidia-dali-cuda120"),
)
MOST_COLUMNS = 12  # of a table
FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")  # of a CPU, which decide how fast it is
# Functions that choose what to measure and say what came out; nothing in them is measured.
AROUND = {"add_options", "goals", "losses_agree", "main", "parser"}
LOAD = os.getloadavg()[0]  # before anything of ours runs: what else the machine has to do
STARTED = time.monotonic()

Results = dict[str, list[dict[str, float]]]  # of each contender, a dict per round
Result = dict[str, Any]  # what is in a file


def numbers(results: Results, name: str, key: str) -> list[float]:
    """One number of a contender, round by round; none if it was not measured."""
    return [found[key] for found in results.get(name, []) if key in found]


def relate(results: Results, key: str, names: Iterable[str], baseline: str) -> None:
    """Add to each round of `names` how many times the baseline's `key` in that round theirs is."""
    for name in names:
        for one, other in zip(results.get(name, []), results.get(baseline, []), strict=False):
            one[f"{key} x {baseline}"] = one[key] / other[key]


def spread(found: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest; mean and standard deviation."""
    shown = {
        "median": statistics.median(found),
        "lowest": min(found),
        "highest": max(found),
        "mean": statistics.mean(found),
    }
    if len(found) > 1:
        shown["deviation"] = statistics.stdev(found)
    return {name: float(f"{number:.5g}") for name, number in shown.items()}


def goal(what: str, asked: str, found: Sequence[float]) -> dict[str, Any]:
    """What is `asked` of the median, such as "<= 0.5", and whether what was `found` reaches it."""
    if not found:
        return {"what": what, "asked": asked, "reached": None}
    sign, _, limit = asked.partition(" ")
    median = statistics.median(found)
    reached = median <= float(limit) if sign == "<=" else median >= float(limit)
    return {"what": what, "asked": asked, "reached": reached, **spread(found)}


def write(path: Path, title: str, about: str, found: dict[str, Any]) -> None:
    """Write what was `found` with its circumstances, and print it: see `measured`."""
    script = Path(sys.argv[0]).resolve()
    result = {
        "title": title,
        "about": about,
        "script": str(script.relative_to(ROOT)),
        "command": command(),
        "date": date.today().isoformat(),
        "seconds": round(time.monotonic() - STARTED),
        "version": version(),
        "commit": commit(),
        "digest": digest(script),
        "load": round(LOAD, 1),
        "machine": machine(),
        "versions": versions(),
        **found,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_text(result), encoding="utf-8")
    print(f"\n{section(result)}\n\n{path}, measured in {result['seconds']} s")


def as_text(result: Result) -> str:
    """A result as JSON, with what holds nothing but values on one line."""
    text = json.dumps(result, indent=1, ensure_ascii=False)
    return re.sub(r"[{\[][^{}\[\]]*[}\]]", lambda leaf: re.sub(r"\n *", " ", leaf[0]), text) + "\n"


def measured(
    results: Results, failures: dict[str, str], goals: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """What a comparison found: each number of each contender, what was asked for, what failed."""
    return {
        "measured": {
            name: {key: spread(numbers(results, name, key)) for key in rounds[0]}
            for name, rounds in results.items()
        },
        "rounds": max(map(len, results.values()), default=1),
        "goals": list(goals),
        "failures": failures,
    }


def load(name: str) -> Result:
    """A result that is in the repository."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def staleness(result: Result) -> str:
    """What a reader should know of the age of a result; nothing if it is of the code as it is."""
    if result["digest"] is None:
        return "measured before digests"
    if result["digest"] != digest(ROOT / result["script"]):
        return "measured before later changes"
    return ""


def findings(result: Result) -> str:
    """A result in Markdown: a table of all numbers, and the goals."""
    parts = [f"## {result['title']}", result["about"]]
    if result["measured"]:
        parts.append(numbers_table(result["measured"]))
    lines = goal_lines(result["goals"])
    lines += [f"- not measured: {name}: {why}" for name, why in result["failures"].items()]
    parts += ["\n".join(lines)] * bool(lines)
    return "\n\n".join(parts)


def section(result: Result) -> str:
    """A result in Markdown, with its circumstances."""
    rounds, seconds, load = (result[key] for key in ("rounds", "seconds", "load"))
    facts = {
        "command": f"`{result['command']}`",
        "measured": f"{result['date']}, {rounds} round{'s' * (rounds != 1)}",
        "seconds in all": seconds,
        "machine": machine_text(result),
        "memory, GB": result["machine"]["memory_gb"],
        "load before": load is not None and f"{load} of {result['machine']['cores']} cores",
        "system": result["machine"]["system"],
        "libraries": libraries_text(result),
        "of": state(result),
    }
    lines = (f"- {name}: {fact}" for name, fact in facts.items() if fact)
    return f"{findings(result)}\n\n" + "\n".join(lines)


def numbers_table(measured: dict[str, dict[str, Any]]) -> str:
    """A row for each contender, a column for each number, and one for all that is relative.

    Turned, where a page has no room for so many columns.
    """
    keys = list(dict.fromkeys(key for row in measured.values() for key in row))
    alone = [key for key in keys if " x " not in key]
    relative = list(dict.fromkeys(key.partition(" x ")[0] for key in keys if " x " in key))
    rows = []
    for name, row in measured.items():
        cells = [cell(row[key]) if key in row else "" for key in alone]
        others = [key for key in row if " x " in key and not key.endswith(f" x {name}")]
        ratios = [f"{cell(row[key])} x {key.partition(' x ')[2]}" for key in others]
        rows.append([name, *cells, *["; ".join(ratios)] * bool(relative)])
    heads = alone + [f"{' and '.join(relative)}, relative"] * bool(relative)
    heads = ["", *(head.replace("_", " ") for head in heads)]
    if len(heads) > MOST_COLUMNS:
        heads, *rows = zip(heads, *rows, strict=True)
    return table(heads, rows)


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], numbers: bool = True) -> str:
    """A Markdown table; if it is of `numbers`, all columns but the first are aligned right."""
    rule = ["---", *("---:" if numbers else "---" for _ in headers[1:])]
    return "\n".join(f"| {' | '.join(row)} |" for row in (headers, rule, *rows))


def cell(found: dict[str, float]) -> str:
    """Median (lowest to highest); mean ± standard deviation where that is what was kept."""
    if "median" not in found:
        return f"{number(found['mean'])} ± {number(found['deviation'], like=found['mean'])}"
    shown = {key: number(found[key]) for key in ("median", "lowest", "highest") if key in found}
    if len(set(shown.values())) == 1:
        return shown["median"]
    dash = " to " if "-" in shown["lowest"] else "\u2013"
    return f"{shown['median']} ({shown['lowest']}{dash}{shown['highest']})"


def number(value: float, like: float | None = None) -> str:
    """A number with three digits that count, four of a thousand; or as many as another's."""
    shown = abs(value if like is None else like)
    digits = 2 - floor(log10(shown)) if shown else 0
    return f"{float(f'{value:.4g}') if shown >= 1000 else value:,.{max(0, digits)}f}"


def goal_lines(goals: Iterable[dict[str, Any]]) -> list[str]:
    """A line for each goal: whether it was reached, and what was measured, of all that have it."""
    found: dict[tuple[str, str, bool | None], list[str]] = {}
    for goal in goals:
        name, _, what = goal["what"].rpartition(": ")
        shown = "" if goal["reached"] is None else f" **{cell(goal)}**"
        found.setdefault((what, goal["asked"], goal["reached"]), []).append(
            f"{name}{shown}".strip()
        )
    ends = {True: "reached", False: "not reached", None: "not measured"}
    return [
        f"- {what}, goal {asked}: {ends[reached]}, {', '.join(shown)}".removesuffix(", ")
        for (what, asked, reached), shown in found.items()
    ]


def machine_text(result: Result) -> str:
    """The machine in a few words."""
    machine, flags = result["machine"], result["machine"]["flags"]
    names = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512 with bf16", "avx512f": "AVX-512"}
    names["avx2"] = "AVX2"
    widest = next((name for flag, name in names.items() if flag in flags), "no AVX2")
    cores = f"{machine['cores']} core{'s' * (machine['cores'] != 1)}"
    shown = f"{cores} of {machine['cpu'].replace('(R)', '')} ({widest})"
    return ", ".join(filter(None, [shown, machine["gpu"]]))


def libraries_text(result: Result) -> str:
    """The versions of the libraries."""
    return ", ".join(f"{name} {number}" for name, number in result["versions"].items())


def machine() -> dict[str, Any]:
    """What was measured on."""
    facts = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, fact = line.partition(":")
        facts.setdefault(name.strip(), fact.strip())
    flags = facts.get("flags", "").split()
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return {
        "cpu": facts.get("model name", platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "flags": [flag for flag in FLAGS if flag in flags],
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "gpu": printed(asked).replace("\n", "; ") or None,
        "system": f"{platform.platform()}, Python {platform.python_version()}",
    }


def versions() -> dict[str, str]:
    """Of the libraries that are installed."""
    found = {}
    for library in LIBRARIES:
        try:
            found[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def command() -> str:
    """The command that runs here; of paths that others do not have, the last part.

    Where the result goes is left out.
    """
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    if "--results" in words:
        place = words.index("--results")
        words[place : place + 2] = []
    script = Path(sys.argv[0]).resolve().relative_to(ROOT)
    called = ["-m", str(script.parent)] if script.name == "__main__.py" else [str(script)]
    return shlex.join(["python", *called, *words])


def version() -> str:
    """The version of the template."""
    text = (PROJECT / "pyproject.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)["tool"]["pretuned"]["version"]


def state(result: Result) -> str:
    """Of which state of the code a result is: a version or, between two of them, a commit."""
    found = result.get("version", "dev")
    return f"commit {result['commit']}" if "dev" in found else f"version {found}"


@cache
def commit() -> str:
    """Which state of the repository this is; an archive of `gpu.py` has it in a file."""
    packed = ROOT / "COMMIT"
    if packed.exists():
        return packed.read_text(encoding="utf-8")
    return printed(["git", "describe", "--always", "--dirty"]) or "unknown"


def printed(words: Sequence[str]) -> str:
    """What a command prints; nothing if there is no such command, or if it fails."""
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def digest(script: Path) -> str:
    """A short name for the code that `script` measures, and for that which measures.

    A script names what it is about in `ABOUT`: modules of the package, or folders with all in them.
    """
    found = hashlib.sha256()
    for path in modules_of(script.resolve()):
        found.update(f"{path.name}\n{code_of(path)}".encode())
        for name in about(path).split():
            named = [PACKAGE / f"{name}.py", *sorted((PACKAGE / name).rglob("*.py"))]
            named = [file for file in named if file.exists() and file.parent.name != "tests"]
            if not named:
                raise FileNotFoundError(f"ABOUT of {path} names {name}, which is not there")
            for module in named:
                found.update(f"{module.relative_to(PACKAGE)}\n{code_of(module)}".encode())
    return found.hexdigest()[:12]


def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def code_of(path: Path) -> str:
    """What a file does, less the functions of a script in which nothing is measured."""
    return "".join(code(parsed(path), set() if path.is_relative_to(PACKAGE) else AROUND))


def about(path: Path) -> str:
    """What a script says in `ABOUT`."""
    found = ""
    for node in parsed(path).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ABOUT":
            found = ast.literal_eval(node.value)
        elif isinstance(node, ast.AugAssign) and ast.unparse(node.target) == "ABOUT":
            found += ast.literal_eval(node.value)
    return found


def modules_of(script: Path) -> list[Path]:
    """A script, and the modules beside it that it imports, and that these import."""
    found = [script]
    for path in found:  # which grows on the way
        names: set[str] = set()
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                names |= {alias.name for alias in node.names}
        beside = (path.with_name(f"{name}.py") for name in names - {Path(__file__).stem})
        found += [file for file in beside if file.exists() and file not in found]
    return sorted(found)


def code(node: object, around: set[str]) -> Iterator[str]:
    """What the code at `node` does, as text that is the same in every version of Python.

    Comments, docstrings, messages of errors and functions called as one of `around` are left out.
    """
    if isinstance(node, list):
        for one in node:
            yield from code(one, around)
    elif isinstance(node, ast.Raise):
        yield "Raise "
    elif isinstance(node, ast.AST):
        if isinstance(node, ast.FunctionDef) and node.name in around:
            return
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            return
        yield f"{type(node).__name__}("
        for name, value in ast.iter_fields(node):
            if isinstance(node, ast.JoinedStr):  # 3.12 ends some of them with nothing
                value = [one for one in value if getattr(one, "value", None) != ""]  # noqa: PLW2901
            if value not in (None, []):  # a field that some versions lack is empty in the others
                yield f"{name}="
                yield from code(value, around)
        yield ")"
    else:
        yield f"{node!r} "
