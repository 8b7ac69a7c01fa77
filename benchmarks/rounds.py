"""Contenders in fresh processes, taking turns; what each costs; tables of medians and ratios.

A script that compares is its own contender: `compare` calls it again with `--contender NAME`, and
the last line that it prints then is the result as JSON. So no contender inherits another's
imports, threads or heap, and a machine that slows down slows all of them down.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PROJECT = ROOT / "{{cookiecutter.project_slug}}"
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = (
    *("torch", "torchvision", "numpy", "pillow", "simplejpeg"),
    *("timm", "lightning", "webdataset", "spdl", "nvidia-dali-cuda120"),
)
LOAD = os.getloadavg()[0]  # before anything of ours runs: what else the machine has to do
LONGEST_SECONDS = 3600  # that one contender may take in one round
TICKS = os.sysconf("SC_CLK_TCK")

Results = dict[str, list[dict[str, float]]]  # of each contender, a dict per round


class Reading(NamedTuple):
    """What the clock and the processors said at a moment."""

    seconds: float
    cpu_seconds: float  # of this process and all its descendants, in user and system mode

    @classmethod
    def now(cls) -> "Reading":
        """The reading at this moment."""
        return cls(time.perf_counter(), sum(map(cpu_seconds_of, tree(os.getpid()))))

    def since(self, earlier: "Reading") -> "Reading":
        """What passed since an earlier reading."""
        return Reading(self.seconds - earlier.seconds, self.cpu_seconds - earlier.cpu_seconds)


def stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on, see `proc_pid_stat(5)`; [] if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def cpu_seconds_of(pid: int) -> float:
    """CPU time of a process with all its threads, and of those of its children that ended."""
    try:
        # The clock of another process, to the nanosecond: see `clock_getcpuclockid(3)`.
        alive = time.clock_gettime(~pid << 3 | 2)
    except OSError:  # it has just ended
        return 0.0
    return alive + sum(map(int, stat(pid)[13:15])) / TICKS


def tree(root: int) -> list[int]:
    """A process and all its descendants."""
    parents = {int(name): stat(int(name)) for name in os.listdir("/proc") if name.isdigit()}
    found = [root]
    for pid in found:  # which grows on the way
        found += [child for child, fields in parents.items() if fields and int(fields[1]) == pid]
    return found


def parser(about: str, rounds: int) -> argparse.ArgumentParser:
    """What every comparison understands."""
    made = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--rounds", type=int, default=rounds, help=f"of each contender ({rounds})")
    made.add_argument("--only", nargs="+", metavar="NAME", help="these contenders alone")
    made.add_argument("--results", type=Path, default=RESULTS, help="folder of the table")
    made.add_argument("--contender", help=argparse.SUPPRESS)
    made.add_argument("--round", type=int, default=0, help=argparse.SUPPRESS)
    return made


def compare(
    script: str, names: Iterable[str], options: argparse.Namespace, *words: str
) -> tuple[Results, dict[str, str]]:
    """The results of each contender, and why those that could not run could not."""
    names = [name for name in names if not options.only or name.partition(":")[0] in options.only]
    results: Results = {name: [] for name in names}
    failures: dict[str, str] = {}
    for number in range(options.rounds):
        # Each round begins with another one: what the first leaves in caches helps the second.
        for name in names[number % len(names) :] + names[: number % len(names)]:
            if name in failures:
                continue
            result = run([script, *sys.argv[1:], *words], name, number)
            if isinstance(result, str):
                failures[name] = result
                shown = f"failed: {result}"
            else:
                results[name].append(result)
                shown = "  ".join(f"{key} {value:.4g}" for key, value in result.items())
            print(f"round {number + 1}  {name:<24} {shown}", flush=True)
    return {name: found for name, found in results.items() if found}, failures


def run(command: Sequence[str], name: str, number: int) -> dict[str, float] | str:
    """What a contender prints at its end; or the last line of its complaint."""
    words = [sys.executable, *command, "--contender", name, "--round", str(number)]
    # Python finds the project in worker processes too, however they are started.
    environment = os.environ | {"PYTHONPATH": str(PROJECT / "src")}
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            env=environment,
            timeout=LONGEST_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"nothing after {LONGEST_SECONDS} s"
    if done.returncode:
        complaint = [line for line in done.stderr.splitlines() if line.strip()]
        return complaint[-1].strip() if complaint else f"exit code {done.returncode}"
    return json.loads(done.stdout.splitlines()[-1])


def values(results: Results, name: str, key: str) -> list[float]:
    """One number of a contender, round by round."""
    return [result[key] for result in results[name]]


def ratios(results: Results, key: str, name: str, baseline: str) -> list[float]:
    """How many times the baseline's number a contender's is, within each round."""
    pairs = zip(values(results, name, key), values(results, baseline, key), strict=False)
    return [one / other for one, other in pairs]


def spread(numbers: Sequence[float], digits: int = 2) -> str:
    """Median (lowest..highest); nothing of nothing."""
    if not numbers:
        return ""
    low, middle, high = min(numbers), statistics.median(numbers), max(numbers)
    shown = f"{middle:,.{digits}f}"
    return shown if len(numbers) == 1 else f"{shown} ({low:,.{digits}f}..{high:,.{digits}f})"


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are aligned to the right."""
    rule = ["---", *("---:" for _ in headers[1:])]
    return "\n".join(f"| {' | '.join(row)} |" for row in (headers, rule, *rows))


def goal(what: str, numbers: Sequence[float] | None, limit: float, at_most: bool) -> str:
    """A line that says whether the median of `numbers` is where it should be."""
    wanted = f"{'<=' if at_most else '>='} {limit:g}"
    if not numbers:
        return f"- {what}: not measured ({wanted} is asked for)"
    middle = statistics.median(numbers)
    reached = middle <= limit if at_most else middle >= limit
    return (
        f"- {what}: **{spread(numbers, 3)}**, {wanted} is asked for: {'yes' if reached else 'no'}"
    )


def missing(failures: dict[str, str]) -> str:
    """What was not measured, and why."""
    return "\n".join(f"- not measured: {name}: {why}" for name, why in failures.items())


def write(folder: Path, name: str, title: str, *parts: str) -> None:
    """Print the tables, and keep them in a file together with what they were measured on."""
    text = "\n\n".join([f"# {title}", *filter(None, parts), machine()]) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    print(f"\n{text}\n{folder / name}.md")


def machine() -> str:
    """What was measured on, with what, when, and by which command."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if "model name" in line), "?")
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    facts = {
        "CPU": f"{model} ({platform.machine()}), {len(os.sched_getaffinity(0))} cores",
        "memory": f"{memory:.0f} GB",
        "system": f"{platform.platform()}, Python {platform.python_version()}",
        "libraries": ", ".join(filter(None, map(version, PACKAGES))),
        "commit": commit(),
        "load when it began": f"{LOAD:.1f} of {len(os.sched_getaffinity(0))} cores",
        "date": date.today().isoformat(),
        "command": f"`python {shlex.join([os.path.relpath(sys.argv[0], ROOT), *words])}`",
    }
    return "\n".join(f"- {key}: {value}" for key, value in facts.items())


def version(package: str) -> str | None:
    """A package with its version, if it is installed."""
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str:
    """Which state of the repository this is."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() or "unknown"


def give(contender: Callable[..., dict[str, Any]], *arguments: object) -> None:
    """Run a contender in this process, and print its result where `run` looks for it."""
    print("\n" + json.dumps(contender(*arguments)), flush=True)
