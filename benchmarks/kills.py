"""Kill a smoke run at random moments, again and again, and compare its end with an unbroken one's.

    python benchmarks/kills.py 30

Prints a line per kill and a verdict; the exit code is 1 if a bit of the weights, the optimizer or
the logged losses differs.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

PROJECT = Path(__file__).resolve().parents[1] / "{{cookiecutter.project_slug}}"
WORKERS = ("0", "1", "2")


def command(folder: Path, workers: str) -> list[str]:
    """A smoke run that decodes in workers and saves every second step."""
    flags = "smoke --data.where stream --run.save-every-steps 2 --run.no-tensorboard --epochs 6"
    script = [sys.executable, str(PROJECT / "train.py"), *flags.split()]
    return [*script, "--data.workers", workers, "--run.dir", str(folder)]


def run(folder: Path, workers: str, seconds: float | None) -> float | None:
    """Train until the end, or until SIGKILL after `seconds`; the time it took, None if killed."""
    began = time.monotonic()
    environment = os.environ | {"PYTHONPATH": str(PROJECT / "src")}
    with subprocess.Popen(
        command(folder, workers), stdout=subprocess.PIPE, env=environment, start_new_session=True
    ) as process:
        try:
            process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return None
        if process.returncode:
            sys.exit(f"the run ended with exit code {process.returncode}")
    return time.monotonic() - began


def saved(folder: Path) -> dict:
    """The last checkpoint, by name; the numbers that a run ended with."""
    return torch.load(folder / "checkpoints" / "last.pt", weights_only=True)


def losses(folder: Path) -> list[tuple]:
    """The rows of the log without what depends on speed."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(row["step"], row.get("train/loss"), row.get("val/loss")) for row in rows]


def difference(one: object, other: object, where: str = "") -> str | None:
    """Where two checkpoints differ, if they do."""
    if isinstance(one, torch.Tensor):
        return None if torch.equal(one, other) else where
    if isinstance(one, dict):
        pairs = ((key, value, other[key]) for key, value in one.items())
    elif isinstance(one, list | tuple):
        pairs = ((key, value, other[key]) for key, value in enumerate(one))
    else:
        return None if one == other else where
    found = (difference(left, right, f"{where}/{key}") for key, left, right in pairs)
    return next(filter(None, found), None)


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kills", type=int)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as scratch:
        unbroken, broken = Path(scratch, "unbroken"), Path(scratch, "broken")
        run(unbroken, "2", None)
        took = run(Path(scratch, "timed"), "2", None)
        kills = 0
        while kills < options.kills:
            seconds = chance.uniform(0.3, 1.0) * took
            if run(broken, chance.choice(WORKERS), seconds) is None:
                kills += 1
                files = sorted((broken / "checkpoints").glob("step_*.pt"))
                newest = files[-1].stem if files else "nothing saved"
                print(f"kill {kills} after {seconds:.2f} s: {newest}", flush=True)
            else:  # it came to its end: begin anew
                verdict(broken, unbroken)
                broken = Path(scratch, f"broken{kills}")
        run(broken, "2", None)
        verdict(broken, unbroken)
    print(f"{options.kills} kills: every run ended as the unbroken one, to the last bit")


def verdict(broken: Path, unbroken: Path) -> None:
    """End the program if the two runs differ."""
    where = difference(saved(broken)["state"], saved(unbroken)["state"])
    if where or losses(broken) != losses(unbroken):
        sys.exit(f"they differ: {where or 'logged losses'}")
    print("a run came to its end: equal to the last bit", flush=True)


if __name__ == "__main__":
    main()
