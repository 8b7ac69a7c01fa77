"""Commands that train several runs, killed with what they started; and clocks that jump."""

import json
import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from image_classifier.config import Config
from PIL import Image

from . import PROJECT
from .children import (
    Command,
    assert_same_end,
    expect,
    fork,
    kill_group,
    small,
    train,
    train_whole,
    wait,
)

SCRIPT = f"""
import sys
sys.path.insert(0, {str(PROJECT / "src")!r})
from image_classifier.cli import main
sys.exit(main())
"""
WORDS = "smoke --optim.warmup-epochs 0 --run.trackers --run.processes 1 --epochs 6 --precision fp32"
WORDS += " --data.batch-size 16 --run.log-every-steps 1 --run.evaluate-every-epochs 1 --run.dir run"
VERBS = {
    "repeat 2": ("--data.limit 160", ("seed-0", "seed-1")),
    "cross-validate 2": (
        "--data.name folder --data.root ../photos --data.image-size 32",
        ("fold-0", "fold-1"),
    ),
}
VICTIMS = ("the command", "the run", "both")
YEAR = 365 * 86_400  # seconds


def several(scratch: Path, tries: int) -> str:
    """Kill `repeat` and `cross-validate`, the run that they train, or both, at random steps."""
    chance = random.Random(6)
    script = scratch / "command.py"
    script.write_text(SCRIPT)
    write_photos(scratch / "photos")
    kills = dict.fromkeys(VICTIMS, 0)
    for verb, (data, names) in VERBS.items():
        words = f"{verb} {WORDS} {data}"
        unbroken = Command(words, scratch / f"{verb} unbroken", script=script)
        expect(unbroken.wait() == 0, f"{verb} failed: {unbroken.said[-300:]}")
        for number in range((tries + 1) // 2):
            name, step = names[number % 2], chance.randrange(1, 20)  # of 24 or 60
            victim = VICTIMS[number % 3]
            command = Command(words, scratch / f"{verb} {number}", script=script)
            command.until_step(step, f"run/{name}")
            children = command.ranks()
            if victim != "the run":
                command.process.kill()
            if victim != "the command":
                for child in children:
                    os.kill(child, signal.SIGKILL)
            code = command.process.wait(60)
            expect(code != 0, f"{verb} ended with 0 though {victim} was killed")
            kills[victim] += 1
            # At once: what a killed command has started may still save.
            command = Command(words, command.cwd, script=script)
            again = command.wait()
            expect(again == 0, f"{verb} after a kill of {victim}: {again}, {command.said[-300:]}")
            for name in names:
                assert_same_end(command.cwd / "run" / name, unbroken.cwd / "run" / name)
            found, expected = (scores(one.cwd / "run") for one in (command, unbroken))
            expect(found == expected, f"{verb}: {found}, not {expected}")
    said = ", ".join(f"{victim} {count}" for victim, count in kills.items())
    return f"killed: {said}; results and runs as those of an unbroken command, to the last bit"


def scores(folder: Path) -> list:
    """What `results.json` says, without what depends on speed."""
    runs = json.loads((folder / "results.json").read_text())["runs"]
    return [[value for key, value in run.items() if "seconds" not in key] for run in runs]


def write_photos(root: Path) -> None:
    """Write 160 small noisy images of two classes."""
    for number in range(160):
        noise = torch.randint(0, 256, (32, 32, 3), generator=torch.Generator().manual_seed(number))
        noise[..., number % 2] //= 2
        path = root / ("ant", "bee")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise.byte().numpy()).save(path)


def clocks(scratch: Path, tries: int) -> str:
    """Let the clock jump by a year at each look, and the times of a killed run's files too."""
    chance = random.Random(7)
    unbroken = small(scratch / "unbroken", epochs=6)
    took = train_whole(unbroken)
    for number in range(tries):
        config = small(scratch / str(number), epochs=6)
        pid = fork(train_in_jumps, config)
        time.sleep(chance.uniform(0.2, 0.8) * took)
        kill_group(pid)
        wait(pid)
        for path in Path(config.run.dir).rglob("*"):
            os.utime(path, times=(jumped(chance), jumped(chance)))
        code = wait(fork(train_in_jumps, config))
        expect(code == 0, f"it ended with {code}")
        assert_same_end(Path(config.run.dir), Path(unbroken.run.dir))
    return "killed and continued, each run ended as the unbroken one to the last bit"


def jumped(chance: random.Random, now: Callable[[], float] = time.time) -> float:
    """The time, or that of a year ago or ahead."""
    return now() + chance.choice((-YEAR, 0, YEAR))


def train_in_jumps(config: Config) -> None:
    """Train with a clock that jumps; `time.monotonic` cannot, on any system."""
    time.time = partial(jumped, random.Random(8))
    train(config)
