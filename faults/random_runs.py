"""Runs with random options, networks and data: refused in a line, or resumed as if never killed."""

import os
import random
import shutil
import signal
import sys
import typing
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import timm  # noqa: F401 - what a run imports on its way is imported here, once for all
from image_classifier.checkpoints.reading import read_checkpoint
from image_classifier.cli import main
from image_classifier.config import Config
from image_classifier.errors import EXIT_FAULT, EXIT_USAGE
from image_classifier.runtime.config_dict import words_of
from image_classifier.tracking import RunLogger

from .children import assert_same_end, expect, fork, kill_group, wait
from .many import write_photos
from .table import LossError

SHARE = 0.09  # of the options are changed
ENDS = {EXIT_USAGE: "refused", EXIT_FAULT: "diverged"}
# Values of options that are neither on nor off nor one of a list; some are refused.
VALUES: dict[str, tuple[Any, ...]] = {
    "epochs": (1, 2, 3.5),
    "seed": (1, 2**40),
    "precision": ("bf16",),
    "data.val_fraction": (0.1, 0.5),
    "data.fold": (1, 4),
    "data.cache": ("off",),
    "data.limit": (40, 100),
    "data.image_size": (16, 24, 33, 48, 64, 80),
    "data.test_size": (32, 48),
    "data.batch_size": (1, 7, 16, 64, 200),
    "data.workers": (0, 1, 2),
    "data.prefetch_batches": (1, 3),
    "data.test_fraction": (0.1, 0.3),
    "augment.min_scale": (0.01, 0.1, 1),
    "augment.cutout": (3, 12),
    "augment.mixup": (0.2, 1),
    "augment.cutmix": (0.2, 1),
    "augment.policy": ("trivialaugment", "randaugment-m9-n2"),
    "augment.min_size": (16, 24),
    "augment.jitter": (0.4,),
    "augment.grayscale": (0.2,),
    "augment.blur": (0.5,),
    "model.width": (8, 24),
    "model.dropout": (0.1, 0.5),
    "model.drop_path": (0.1, 0.5),
    "model.lora_rank": (1, 4),
    "optim.name": ("adamw", "muon"),
    "optim.lr": (0.0, 1e-3, 0.1),
    "optim.momentum": (0.0, 0.5),
    "optim.weight_decay": (0.0, 0.1),
    "optim.warmup_epochs": (0.5, 1),
    "optim.label_smoothing": (0.1,),
    "optim.clip_norm": (0.1, 1),
    "optim.accumulate": (2, 3),
    "optim.ema_decay": (0.5, 0.99),
    "optim.layer_decay": (0.5, 0.9),
    "run.log_every_steps": (1, 5),
    "run.evaluate_every_epochs": (0.3, 0.7, 2),
    "run.best_by": ("loss", "top5", "balanced_accuracy", "macro_f1"),
    "run.patience": (1, 2),
    "run.error_cost": (5,),
    "run.min_precision": (0.9,),
    "run.trackers": (("tensorboard",),),
}
# Where a run is and what it reads, which others than the draws decide; what needs another machine,
# minutes or the clock; networks of several runs.
LEFT_OUT = """data.name data.root data.labels data.columns data.channels data.bits data.groups
    model.name model.task model.members optim.loss optim.teacher optim.teacher_share
    optim.teacher_temperature compute.device compute.compile config profile run.dir run.processes
    run.fresh run.init_from run.max_minutes run.finish_in_time run.timeout_seconds"""
OF_TORCHVISION = """resnet18 mobilenet_v3_small shufflenet_v2_x0_5 squeezenet1_1 mnasnet0_5
    regnet_y_400mf efficientnet_b0 googlenet densenet121 convnext_tiny swin_t"""
OF_TIMM = """resnet10t repvgg_a0 coatnet_nano_rw_224 vit_tiny_patch16_224 levit_128s
    xcit_nano_12_p8_224 hiera_tiny_224 tiny_vit_5m_224 crossvit_tiny_240 eva02_tiny_patch14_224
    mobilenetv4_conv_small efficientformer_l1 cait_xxs24_224 mambaout_femto fastvit_t8 convnext_atto
    edgenext_xx_small pit_ti_224 poolformerv2_s12 ghostnet_100 deit3_small_patch16_224
    efficientvit_b0 nextvit_small"""
NETWORKS = ["resnet9", "resnet9_gn", *OF_TORCHVISION.split()]
NETWORKS += [f"timm/{name}" for name in OF_TIMM.split()]


def resumed(scratch: Path, tries: int) -> str:
    """Begin runs, kill those that are not refused at a random step, and begin them again."""
    datasets = write_datasets(scratch)
    ends = Counter(try_one(number, datasets, scratch / str(number)) for number in range(tries))
    expect(ends["saved"] > 0, f"none of the runs went on from a save: {dict(ends)}")
    return (
        f"{ends['refused']} refused in a line, {ends['diverged']} diverged and said so; the others "
        f"were killed, {ends['saved']} went on from a save, {ends['unsaved']} from nothing: each "
        "ended as the unbroken one to the last bit"
    )


def try_one(number: int, datasets: list[dict[str, Any]], folder: Path) -> str:
    """Train with the options of run `number`: once unbroken and, if not refused, once killed.

    Returns what it was: refused, diverged, or killed when it had `saved` or was `unsaved`.
    """
    chance = random.Random(number)
    knobs = random_knobs(chance) | chance.choice(datasets)
    words = ["shapes", *words_of(knobs), "--run.processes", "1"]
    try:
        if chance.random() < 0.3 or "model.lora_rank" in knobs:  # from weights of its own network
            first = {"epochs": 0.5, "optim.warmup_epochs": 0, "model.lora_rank": 0}
            if attempt([*words, *words_of(first)], folder / "first") == 0:
                words += ["--run.init-from", str(folder / "first")]
        code = attempt(words, folder / "unbroken")
        end = ENDS.get(code) or kill_and_resume(words, folder, chance)
    except LossError as loss:
        raise LossError(f"run {number}: {loss}: {' '.join(words)}") from loss
    shutil.rmtree(folder)
    return end


def kill_and_resume(words: list[str], folder: Path, chance: random.Random) -> str:
    """Train as in `folder/unbroken`, killed after a random step and begun again: it ends alike.

    Returns whether it was `saved` or `unsaved` when it was killed.
    """
    unbroken = folder / "unbroken"
    killed = folder / "killed"
    steps = read_checkpoint(unbroken / "checkpoints" / "last.pt")["state"]["step"]
    step = chance.randint(1, max(1, steps - 1))
    by = chance.choice((signal.SIGKILL, signal.SIGTERM)) if step < steps else signal.SIGKILL
    code = attempt(words, killed, kill_at=(step, by))
    expected = -by if by == signal.SIGKILL else 128 + by
    expect(code == expected, f"{by.name} after step {step} ended it with {code}")
    is_saved = (killed / "checkpoints" / "last.pt").exists()
    code = attempt(words, killed)
    expect(code == 0, f"killed by {by.name} after step {step}, it did not go on: {code}")
    assert_same_end(killed, unbroken)
    return "saved" if is_saved else "unsaved"


def attempt(words: list[str], folder: Path, kill_at: tuple[int, int] | None = None) -> int:
    """Train in a child: its exit code.

    Raises:
        LossError: if it ends with a traceback, or in another way that no run of `ENDS` does.
    """
    folder.parent.mkdir(exist_ok=True)
    said = folder.parent / "said"
    code = wait(fork(train, [*words, "--run.dir", str(folder)], said, kill_at))
    text = said.read_text()
    expect("Traceback" not in text, f"exit code {code}, {text[-1500:]}")
    if kill_at is None and code:
        expect(code in ENDS, f"exit code {code}, {text}")
        why = "error: " if code == EXIT_USAGE else "the loss is not finite"
        expect(text.startswith(why) and text.count("\n") == 1, f"not in a line: {text}")
    return code


def train(words: list[str], said: Path, kill_at: tuple[int, int] | None) -> None:
    """Train as the command line says; a signal `kill_at[1]` comes after step `kill_at[0]`.

    It exits by itself, as `fork` would make an exit code of 0 or 1 of all others.
    """
    with said.open("w") as file:
        os.dup2(file.fileno(), 2)
    if kill_at is not None:
        RunLogger.step = killing(RunLogger.step, *kill_at)
    code = main(["train", *words])
    sys.stderr.flush()
    os._exit(code)


def killing(own: Callable[..., None], last: int, by: int) -> Callable[..., None]:
    """`RunLogger.step` that, after the step `last`, sends the signal `by` to the whole run."""

    def noting(logger: RunLogger, step: int, *of_step: Any) -> None:  # noqa: ANN401
        own(logger, step, *of_step)
        if step == last:
            kill_group(os.getpid(), by)

    return noting


def random_knobs(chance: random.Random) -> dict[str, Any]:
    """A network, and about `SHARE` of all options with another value than their default."""
    knobs: dict[str, Any] = {
        "epochs": 2,
        "data.image_size": 32,
        "precision": "fp32",  # auto measures, and may choose another when it begins again
        "data.limit": 160,
        "data.batch_size": 12,
        "optim.lr": 0.01,
        "optim.warmup_epochs": 0,
        "model.name": chance.choice(NETWORKS),
        "model.width": 8,
        "run.evaluate_every_epochs": 0.3,
        "run.trackers": (),
    }
    for knob, values in known_values():
        if chance.random() < SHARE:
            knobs[knob] = chance.choice(values)
    return knobs


def known_values(kind: type = Config, prefix: str = "") -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Options with the values to try: those of `VALUES`, the others of a list, on or off.

    Raises:
        LossError: if an option has none, and is not left out.
    """
    hints = typing.get_type_hints(kind)
    for knob in fields(kind):
        name = f"{prefix}{knob.name}"
        hint = hints[knob.name]
        if is_dataclass(hint):
            yield from known_values(hint, f"{name}.")
        elif name in LEFT_OUT.split():
            continue
        elif name in VALUES:
            yield name, VALUES[name]
        elif hint is bool:
            yield name, (not knob.default,)
        elif typing.get_origin(hint) is Literal:
            yield name, tuple(one for one in typing.get_args(hint) if one != knob.default)
        else:
            raise LossError(f"{name} is neither in VALUES nor in LEFT_OUT")


def write_datasets(scratch: Path) -> list[dict[str, Any]]:
    """Write images in several forms; the options that read each."""
    photos, arrays, table = scratch / "photos", scratch / "arrays", scratch / "labels.csv"
    write_photos(photos)
    draw = np.random.default_rng(0)
    for number in range(100):
        path = arrays / "ab"[number % 2] / f"{number}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, draw.integers(0, 2**16, (20 + number % 9, 30, 5), dtype=np.uint16))
    paths = sorted(path.relative_to(photos) for path in photos.rglob("*.png"))
    labels = ["ant|bee", "bee", "", "cat|ant"]
    rows = [f"{path},{labels[number % 4]}\n" for number, path in enumerate(paths)]
    table.write_text("path,label\n" + "".join(rows))
    folder = {"data.name": "folder", "data.root": str(photos)}
    several = {"data.labels": str(table), "model.task": "multi-label"}
    groups = {"data.groups": r"([0-9])[0-9]*\."}
    five = {"data.root": str(arrays), "data.channels": 5}
    return [
        {"data.root": str(scratch / "shapes")},  # drawn, not read: features are kept beside it
        folder,
        folder | groups | {"data.test_fraction": 0.2},
        folder | {"data.channels": 1},
        folder | {"data.bits": 16, "data.channels": 1},
        folder | several,
        folder | several | {"optim.loss": "asymmetric"},
        folder | five,
        folder | five | {"data.bits": 16},
    ]
