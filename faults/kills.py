"""`kill -9`, power cuts and damage: what was saved is there, and a run ends as an unbroken one."""

import filecmp
import hashlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from image_classifier.checkpoints.reading import DamagedError, read_checkpoint
from image_classifier.checkpoints.saving import Checkpoints
from image_classifier.checkpoints.state import TrainState
from image_classifier.config import Config
from image_classifier.data import Batch, TrainData
from image_classifier.data.datasets import open_dataset
from image_classifier.errors import UserError
from image_classifier.optim import build_optimizer
from image_classifier.precision import Precision
from image_classifier.runtime.distributed import World
from PIL import Image

from .children import (
    SMALL,
    Command,
    assert_same_end,
    difference,
    ends_within,
    expect,
    fork,
    kill_group,
    small,
    status,
    train,
    train_whole,
    wait,
)
from .table import LossError, NotHereError

CPU = World(torch.device("cpu"))
SAVE_EVERY = 2


def in_training(scratch: Path, tries: int, **more: Any) -> str:  # noqa: ANN401
    """Kill runs at random moments, with any number of workers, until each comes to its end."""
    chance = random.Random(0)
    knobs = {"run__evaluate_every_epochs": SAVE_EVERY / 10, "data__where": "stream", **more}
    unbroken = small(scratch / "unbroken", data__workers=1, **knobs)
    took = train_whole(unbroken)
    in_saves = runs = before = 0
    folder = scratch / "run"

    def begin() -> int:
        return fork(train, small(folder, data__workers=chance.choice((0, 1, 2)), **knobs))

    for is_done in killed_at_random(begin, folder, tries, took, chance):
        if is_done:
            assert_same_end(folder, Path(unbroken.run.dir))
            runs += 1
            before = 0
            continue
        in_saves += any(folder.glob("checkpoints/.*"))
        expect(newest(folder) >= before, "a checkpoint that was there is gone")
        before = newest(folder)
    return (
        f"{runs} runs were resumed to their end, each bit for bit as an unbroken one; {in_saves} "
        f"kills fell into a save; at most {SAVE_EVERY} steps, from save to save, were made again"
    )


def with_tools(scratch: Path, tries: int) -> str:
    """`in_training` with augmentation of a tool, on images of groups, some of them for a test."""
    draw = np.random.default_rng(0)
    for number in range(200):
        path = scratch / "photos" / "ab"[number % 2] / f"{number // 4}_{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        shape = (32, 32, 3)
        Image.fromarray(draw.integers(0, 256, shape, dtype=np.uint8)).save(path)
    said = in_training(
        scratch,
        tries,
        data__name="folder",
        data__root=str(scratch / "photos"),
        data__image_size=32,
        data__groups=r"([0-9]+)_[0-9]+\.",
        data__test_fraction=0.2,
        augment__vertical_flip=True,
        augment__turns=True,
        augment__jitter=0.4,
        augment__grayscale=0.2,
        augment__blur=0.5,
    )
    expect((scratch / "unbroken" / "test.json").exists(), "the test part was not scored")
    return said


def killed_at_random(  # noqa: PLR0913, PLR0917 - a run, and how it is killed
    begin: Callable[[], int],
    folder: Path,
    tries: int,
    took: float,
    chance: random.Random,
    kill: Callable[[int], object] = kill_group,
) -> Iterator[bool]:
    """Begin runs in `folder`, kill `tries` of them, and let the last come to its end.

    Yields after each, a run of about `took` seconds if nobody kills it: whether it came to its end,
    after which it is removed. What a kill leaves is readable.
    """
    kills = 0
    while kills < tries or folder.exists():
        is_whole = not folder.exists()
        began = time.monotonic()
        pid = begin()
        if kills < tries:
            if ends_within(pid, chance.uniform(0.1, 0.9) * took) and is_whole:
                took = time.monotonic() - began  # the machine was busy when it took longer
            kill(pid)
        if wait(pid) == 0:
            yield True
            shutil.rmtree(folder)
            continue
        kills += 1
        assert_readable(folder)
        yield False


def with_deterministic(scratch: Path, tries: int, **more: Any) -> str:  # noqa: ANN401
    """`in_training` in bf16 with `--deterministic`, on whatever device there is."""
    return in_training(scratch, tries, deterministic=True, precision="bf16", **more)


def of_transformers(scratch: Path, tries: int) -> str:
    """`with_deterministic` of a network whose attention and maps have kernels of their own."""
    return with_deterministic(scratch, tries, model__name="vit_s", data__image_size=64, epochs=1)


def without_deterministic(scratch: Path, tries: int) -> str:
    """Kill runs that may round differently: each step has the images of an unbroken run."""
    chance = random.Random(5)
    knobs = {"run__evaluate_every_epochs": SAVE_EVERY / 10, "data__where": "stream"}
    knobs |= {"data__workers": 2, "precision": "bf16"}
    took = train_whole(small(scratch / "warm", **knobs))
    pid = fork(train_and_note, small(scratch / "unbroken", **knobs), scratch / "expected")
    expect(wait(pid) == 0, "a run ended with an error")
    seen = (scratch / "expected").read_text().splitlines()
    runs = 0
    folder, noted = scratch / "run", scratch / "noted"

    def begin() -> int:
        return fork(train_and_note, small(folder, **knobs), noted)

    for is_done in killed_at_random(begin, folder, tries, took, chance):
        if is_done:
            found = {*noted.read_text().splitlines()}
            expect(found == {*seen}, f"{len(found ^ {*seen})} batches differ")
            runs += 1
            noted.unlink()
    return f"{runs} runs were resumed to their end, all with the same {len(seen)} batches"


def train_and_note(config: Config, path: Path) -> None:
    """Train, and add a line to a file for each batch: step, images, labels and pixels."""
    own = TrainData.batches

    def noting(data: TrainData, start: int, stop: int) -> Iterator[Batch]:
        for step, batch in enumerate(own(data, start, stop), start):
            parts = (batch.indices, batch.labels, batch.images.contiguous())
            digest = hashlib.sha256(b"".join(part.cpu().numpy().tobytes() for part in parts))
            with path.open("a") as file:
                file.write(f"{step} {digest.hexdigest()}\n")
            yield batch

    TrainData.batches = noting
    train(config)


def data_workers(scratch: Path, tries: int) -> str:
    """Kill one of two data workers of runs, until each comes to its end."""
    chance = random.Random(4)
    knobs = {"data__where": "stream", "data__workers": 2, "run__evaluate_every_epochs": 0.5}
    unbroken = small(scratch / "unbroken", epochs=6, **knobs)
    took = train_whole(unbroken)
    longest = kills = runs = 0.0
    folder = scratch / "run"
    while kills < tries or folder.exists():
        pid = fork(train, small(folder, epochs=6, **knobs))
        worker = 0
        if kills < tries:
            time.sleep(chance.uniform(0.1, 0.6) * took)
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            worker = int(chance.choice(children)) if children else 0
        began = time.monotonic()
        if worker:
            os.kill(worker, signal.SIGKILL)
        code = wait(pid)
        if code == 0:
            assert_same_end(folder, Path(unbroken.run.dir))
            runs += 1
            shutil.rmtree(folder)
            continue
        expect(code == 1, f"exit code {code}")
        longest = max(longest, time.monotonic() - began)
        kills += 1
        told = status(folder)["message"]
        expect(f"(process {worker}) was ended by SIGKILL" in told, f"not named: {told}")
    expect(longest < 3, f"it took {longest:.1f} s to end")
    return (
        f"named at most {longest:.1f} s later; {runs:.0f} runs were resumed to their end, "
        "each bit for bit as an unbroken one"
    )


def all_ranks(scratch: Path, tries: int) -> str:
    """Kill runs of 1, 2 and 3 ranks, all processes at once, until each comes to its end."""
    chance = random.Random(6)
    runs = sum(kill_ranks(scratch, size, tries // 3, chance) for size in (1, 2, 3))
    return f"{runs} runs were resumed to their end, each as an unbroken one of as many ranks"


def kill_ranks(scratch: Path, size: int, tries: int, chance: random.Random) -> int:
    """Kill runs of `size` ranks, `tries` times; how many came to their end."""
    words = f"{SMALL} --run.processes {size} --run.dir run --epochs 8"
    words += " --run.evaluate-every-epochs 0.5"
    began = time.monotonic()
    unbroken = Command(words, scratch / f"unbroken{size}")
    expect(unbroken.wait() == 0, f"a run of {size} ended with an error: {unbroken.said[-300:]}")
    took = time.monotonic() - began
    folder = scratch / str(size) / "run"
    command = unbroken
    runs = 0

    def begin() -> int:
        nonlocal command
        command = Command(words, folder.parent)
        return command.process.pid

    def kill(_: int) -> None:  # ranks are in sessions of their own
        command.close()

    for is_done in killed_at_random(begin, folder, tries, took, chance, kill):
        if is_done:
            assert_same_end(folder, unbroken.cwd / "run")
            runs += 1
    return runs


def newest(folder: Path) -> int:
    """The step of the checkpoint that a run would go on from; 0 if there is none."""
    path = folder / "checkpoints" / "last.pt"
    return read_checkpoint(path)["state"]["step"] if path.exists() else 0


def assert_readable(folder: Path) -> None:
    """Every checkpoint under its name is whole."""
    for path in folder.glob("checkpoints/*.pt"):
        try:
            read_checkpoint(path)
        except (DamagedError, UserError) as error:
            raise LossError(f"unreadable after a kill: {error}") from error


def save_on(config: Config, acknowledge: Callable[[int], object], pause: float = 0.0) -> None:
    """Save again and again, 24 MB of random weights each time; tell when one is on the disk."""
    model = torch.nn.Sequential(*(torch.nn.Linear(1000, 1000) for _ in range(3)))
    optimizer = build_optimizer(config.optim, model)
    precision = Precision("fp32", config.compute, config.optim, CPU.device)
    state = TrainState(model, optimizer, precision)
    checkpoints = Checkpoints(config, CPU, open_dataset(config.data, "train"))
    while True:
        state.step += 1
        model[0].weight.data.fill_(state.step)
        checkpoints.save(state, {"loss": 0.0, "step": state.step})
        checkpoints.wait()
        acknowledge(state.step)
        time.sleep(pause)


def save_and_tell(config: Config, send: int) -> None:
    """`save_on`, which writes the steps to a pipe."""
    save_on(config, lambda step: os.write(send, step.to_bytes(8, "little")))


def in_saves(scratch: Path, tries: int) -> str:
    """Kill a process that does nothing but save."""
    chance = random.Random(1)
    inside = 0
    config = small(scratch / "run")
    folder = Path(config.run.dir)
    for _ in range(tries):
        shutil.rmtree(folder, ignore_errors=True)
        receive, send = os.pipe()
        pid = fork(save_and_tell, config, send)
        os.close(send)
        first = os.read(receive, 8)  # it has begun, and saved once
        time.sleep(chance.uniform(0, 0.3))
        kill_group(pid)
        wait(pid)
        with os.fdopen(receive, "rb") as acknowledged:
            told = first + acknowledged.read()
        step = int.from_bytes(told[-8:], "little")
        inside += any(folder.glob("checkpoints/.*"))
        assert_readable(folder)
        kept = newest(folder)
        expect(kept >= step, f"step {step} was told to be saved, {kept} is there")
        left = [path.name for path in folder.glob("checkpoints/.*")]
        expect(len(left) <= 1, f"kills leave {left}")
    return f"{inside} kills fell into a write; 0 unreadable, 0 of those told to be saved are gone"


def save_and_note(config: Config, told: Path) -> None:
    """`save_on`, which notes the last step in a file elsewhere."""
    save_on(config, lambda step: told.write_text(str(step)), pause=0.01)


def power_cut(scratch: Path, tries: int) -> str:
    """Stop the writer and copy the disk below it as it is: what was never flushed is not there."""
    if os.geteuid() or not Path("/dev/loop-control").exists():
        raise NotHereError("needs root and loop devices")
    chance = random.Random(2)
    image, copy, mount = scratch / "disk", scratch / "copy", scratch / "mount"
    mount.mkdir()
    for number in range(tries):
        with image.open("wb") as file:
            file.truncate(300 * 2**20)
        script = f"mkfs.ext4 -q -F {image} && mount -o loop {image} {mount}"
        if subprocess.run(["sh", "-c", script], check=False, capture_output=True).returncode:
            raise NotHereError("no disk can be mounted")
        told = scratch / f"told{number}"
        try:
            pid = fork(save_and_note, small(mount / "run"), told)
            while not told.exists():
                time.sleep(0.01)
            time.sleep(chance.uniform(0.05, 1.0))
            kill_group(pid, signal.SIGSTOP)
            step = int(told.read_text() or 1)
            shutil.copyfile(image, copy)
            while not filecmp.cmp(image, copy, shallow=False):  # the kernel has written meanwhile
                shutil.copyfile(image, copy)
            kill_group(pid)
            wait(pid)
        finally:
            subprocess.run(["umount", "-l", str(mount)], check=False)
        subprocess.run(["mount", "-o", "loop", str(copy), str(mount)], check=True)
        try:
            assert_readable(mount / "run")
            kept = newest(mount / "run")
            expect(kept >= step, f"step {step} was told to be saved, {kept} is on the disk")
        finally:
            subprocess.run(["umount", str(mount)], check=True)
    return "ext4 on a loop device, mounted again from the copy: 0 unreadable, 0 told saves gone"


def damage(scratch: Path, tries: int) -> str:
    """Change, cut and lengthen a checkpoint: it is refused, or what was saved is read."""
    config = small(scratch / "run", epochs=0.1)
    train_whole(config)
    path = Path(config.run.dir, "checkpoints", "last.pt")
    whole = path.read_bytes()
    state = read_checkpoint(path)
    chance = random.Random(3)
    refused = 0
    for number in range(tries):
        content = bytearray(whole)
        if number % 4 == 0:
            del content[chance.randrange(len(content)) :]
        elif number % 4 == 1:
            start = chance.randrange(len(content))
            content[start : start + 512] = bytes(len(content[start : start + 512]))
        else:
            for _ in range(chance.choice((1, 1, 10))):
                content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        path.write_bytes(content)
        try:
            read = read_checkpoint(path)
        except (DamagedError, UserError):
            refused += 1
            continue
        where = difference(read, state)
        expect(where is None, f"a damaged checkpoint was read as if it were sound: {where}")
    return f"{refused} refused by name, {tries - refused} read with nothing changed in them"
