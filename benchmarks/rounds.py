"""Contenders in fresh processes, taking turns, and what each costs.

A script that compares is its own contender: `compare` calls it again with `--contender NAME`, and
the last line that it prints then is the result as JSON. So no contender inherits another's
imports, threads or heap, and a machine that slows down slows all of them down.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import measurements
from measurements import PROJECT, RESULTS, Results

LONGEST_SECONDS = 3600  # that one contender may take in one round
TICKS = os.sysconf("SC_CLK_TCK")


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
    made.add_argument("--only", nargs="+", metavar="NAME", help="these contenders, or NAME:...")
    made.add_argument("--results", type=Path, default=RESULTS, help="folder of the result")
    made.add_argument("--contender", help=argparse.SUPPRESS)
    made.add_argument("--round", type=int, default=0, help=argparse.SUPPRESS)
    return made


def compare(
    script: str, names: Iterable[str], options: argparse.Namespace, *words: str
) -> tuple[Results, dict[str, str]]:
    """The results of each contender, and why those that could not run could not.

    Ctrl-C ends it with the rounds that are whole.
    """
    begins = tuple(f"{name}:" for name in options.only or [])
    names = [name for name in names if f"{name}:".startswith(begins or "")]
    results: Results = {name: [] for name in names}
    failures: dict[str, str] = {}
    # Both remember: a result is of the code as it is now, whatever is edited meanwhile.
    measurements.digest(Path(script))
    measurements.commit()
    for number in range(options.rounds):
        try:
            rows = play(script, names, failures, number, *words)
        except KeyboardInterrupt:  # whole rounds are a result, part of one is not
            print(f"interrupted: {number} rounds", flush=True)
            break
        for name, row in rows.items():
            results[name].append(row)
    return {name: found for name, found in results.items() if found}, failures


def play(
    script: str, names: Sequence[str], failures: dict[str, str], number: int, *words: str
) -> dict[str, dict[str, float]]:
    """One round: the result of each contender; one that can't run is added to `failures`."""
    rows = {}
    # Each round begins with another one: what the first leaves in caches helps the second.
    for name in names[number % len(names) :] + names[: number % len(names)]:
        if name in failures:
            continue
        result = run([script, *sys.argv[1:], *words], name, number)
        if isinstance(result, str):
            failures[name] = result
            shown = f"failed: {result}"
        else:
            rows[name] = result
            shown = "  ".join(f"{key} {value:.4g}" for key, value in result.items())
        print(f"round {number + 1}  {name:<24} {shown}", flush=True)
    return rows


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
        complaint = [line for line in done.stderr.splitlines() if re.search(r"\w", line)]
        return complaint[-1].strip() if complaint else f"exit code {done.returncode}"
    return json.loads(done.stdout.splitlines()[-1])


def give(contender: Callable[..., dict[str, Any]], *arguments: object) -> None:
    """Run a contender in this process, and print its result where `run` looks for it."""
    print("\n" + json.dumps(contender(*arguments)), flush=True)
