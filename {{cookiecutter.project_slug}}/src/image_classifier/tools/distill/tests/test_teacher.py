"""Distillation: a student learns what a trained model knows, on any number of ranks."""

import re
import shutil
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import changed, losses, mixed, run_ranks, train_until
from torch.nn.functional import interpolate, one_hot

from image_classifier.checkpoints.reading import read_checkpoint
from image_classifier.config import ComputeConfig
from image_classifier.data import datasets
from image_classifier.data.datasets.source import Source
from image_classifier.errors import UserError
from image_classifier.runtime.distributed import World
from image_classifier.tools.distill import loss
from image_classifier.tools.distill.loss import Teacher
from image_classifier.tracking.trackers import public_knobs
from image_classifier.train import train

CPU = World(torch.device("cpu"))
SHADES = "dark", "gray", "bright"


def last(config):
    """The last checkpoint of a run."""
    return read_checkpoint(Path(config.run.dir, "checkpoints", "last.pt"))


def shades(classes, is_random=False):
    """A dataset of dark, gray and bright noise; its training labels may say nothing of it."""

    def read(_, split):
        generator = torch.Generator().manual_seed(len(split))
        level = torch.arange(64) % len(classes)
        place = torch.tensor([SHADES.index(name) for name in classes])[level]
        noise = torch.randint(0, 40, (64, 32, 32, 3), generator=generator)
        pixels = (noise + 100 * place[:, None, None, None]).byte()
        guesses = torch.arange(64) // len(classes) % len(classes)
        return Source(guesses if is_random and split == "train" else level, classes, pixels)

    return read


def test_a_teacher_of_images_of_other_channels_is_refused(taught, monkeypatch):
    def gray(data, split):
        found = datasets.shapes(data, split)
        return Source(found.labels, found.classes, pixels=found.pixels[..., :1], channels=1)

    monkeypatch.setitem(datasets.DATASETS, "gray", gray)
    with pytest.raises(UserError, match="knows images of 3 channels, and these have 1"):
        train(changed(taught, data__name="gray", data__channels=1))


def test_trackers_get_no_path_of_the_teacher_but_its_share(taught):
    knobs = public_knobs(taught)
    assert taught.optim.teacher not in knobs.values()
    assert knobs["optim.teacher-share"] == 0.75


@pytest.fixture
def taught(config, trained_once):
    """A run that learns from a finished one."""
    config = changed(config, optim__teacher=str(trained_once), optim__teacher_share=0.75)
    return changed(config, run__evaluate_every_epochs=0.25)


def test_a_student_of_random_labels_learns_what_its_teacher_knows(config, tmp_path, monkeypatch):
    monkeypatch.setitem(datasets.DATASETS, "known", shades(SHADES))
    # Fewer classes, in another order.
    monkeypatch.setitem(datasets.DATASETS, "guessed", shades(("bright", "dark"), is_random=True))
    config = changed(config, data__name="known", epochs=4, optim__warmup_epochs=0)
    assert train(config).value("top1") == 1
    config = changed(config, data__name="guessed", optim__teacher=config.run.dir)
    runs = [
        changed(config, optim__teacher_share=share, run__dir=str(tmp_path / f"{share}"))
        for share in (0.0, 1.0)
    ]
    alone, taught = (train(run).value("top1") for run in runs)
    assert alone < 0.8
    assert taught == 1


IMAGES = {"mean": (0.4, 0.5, 0.6), "std": (0.2, 0.3, 0.4)}  # that students learn from


def teacher_of(folder, classes, share, temperature=1.0, has_several=False):
    """The run in `folder` as the teacher of students of these classes."""
    source = Namespace(classes=classes, is_multi_label=has_several, **IMAGES)
    data = Namespace(world=CPU, source=source)
    return Teacher(str(folder), share, temperature, ComputeConfig(), data)


def test_targets_lie_between_labels_and_the_teachers_probabilities(finished):
    saved = last(finished)
    classes = tuple(saved["classes"][::-1])
    teacher = teacher_of(finished.run.dir, classes, 0.75, temperature=2)
    pixels = torch.rand(5, 3, 48, 48)  # from 0 to 1
    theirs, mine = (
        [torch.tensor(values)[:, None, None] for values in (source["mean"], source["std"])]
        for source in (saved, IMAGES)
    )
    small = interpolate(pixels, (32, 32), mode="bilinear", antialias=True)
    with torch.inference_mode():
        logits = teacher.model((small - theirs[0]) / theirs[1]).flip(1)
    soft = (logits / 2).softmax(1)
    labels = torch.tensor([0, 9, -1, 4, 4])  # one could not be read
    hard = one_hot(labels.clamp(min=0), 10).float() * (labels >= 0)[:, None]
    images = (pixels - mine[0]) / mine[1]
    targets = teacher(images, labels)
    expected = 0.25 * hard + 0.75 * soft * (labels >= 0)[:, None]
    torch.testing.assert_close(targets, expected, rtol=1e-4, atol=1e-5)
    assert not targets.requires_grad
    assert not targets[2].any()
    mixed = hard.lerp(hard.flip(0), 0.3)  # as mixup gives them; a third of the image is unreadable
    expected = 0.25 * mixed + 0.75 * soft * mixed.sum(1, keepdim=True)
    torch.testing.assert_close(teacher(images, mixed), expected, rtol=1e-4, atol=1e-5)
    teacher.share = 0.0
    assert torch.equal(teacher(images, labels), hard)


def test_of_several_labels_what_is_unknown_stays_unknown(finished):
    teacher = teacher_of(finished.run.dir, ("star", "disc"), 0.5, has_several=True)
    images, labels = torch.rand(3, 3, 32, 32), torch.tensor([[1, 0], [0, -1], [-1, -1]])
    shares, targets = teacher.probabilities(images), teacher(images, labels.to(torch.int8))
    assert torch.equal(targets[labels < 0], torch.tensor([-1.0] * 3))
    known = labels >= 0
    torch.testing.assert_close(targets[known], (labels[known] + shares[known]) / 2)


def test_an_interrupted_student_ends_as_an_unbroken_one(taught, tmp_path):
    config = changed(taught, optim__accumulate=2, optim__ema_decay=0.9, **mixed(mixup=1.0))
    config = changed(config, data__image_size=24, model__dropout=0.2)
    unbroken = changed(config, run__dir=str(tmp_path / "unbroken"))
    train(unbroken)
    train_until(config, 3, kill=False)
    train(config)
    for part in ("model", "ema", "optimizer"):
        one, other = (last(run)["state"][part] for run in (config, unbroken))
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_the_number_of_ranks_and_micro_batches_changes_nothing(taught, trained_once, tmp_path):
    train(taught)
    split = changed(taught, run__dir=str(tmp_path / "split"), optim__accumulate=2)
    run_ranks(2, train, split)
    assert losses(split.run.dir) == pytest.approx(losses(taught.run.dir), rel=1e-3)
    assert losses(taught.run.dir)[-1] != pytest.approx(losses(trained_once)[-1], rel=1e-3)


def test_a_run_resumes_only_with_the_teacher_that_it_had(taught, trained_once, tmp_path):
    folder = tmp_path / "teacher"
    shutil.copytree(trained_once, folder)
    config = changed(taught, optim__teacher=str(folder))
    train_until(config, 3, kill=False)
    replaced = folder / "checkpoints" / "best.pt"
    torch.save(torch.load(replaced, weights_only=True) | {"torch": "another"}, replaced)
    with pytest.raises(UserError, match=r"the file of its teacher was replaced.*--run.fresh"):
        train(config)


def test_a_teacher_that_cannot_teach_is_refused_in_a_line(trained_once):
    with pytest.raises(UserError, match=r"does not know all classes.*; it lacks 1: ant$"):
        teacher_of(trained_once, ("ant",), 0.5)
    missing = Path(trained_once, "none")
    with pytest.raises(UserError, match=re.escape(f"there is no checkpoint '{missing}'")):
        teacher_of(missing, ("ant",), 0.5)


def test_a_teacher_of_one_label_does_not_teach_several(taught, monkeypatch):
    def several(data, split):
        found = datasets.shapes(data, split)
        labels = one_hot(found.labels, len(found.classes)).to(torch.int8)
        return replace(found, labels=labels)

    monkeypatch.setitem(datasets.DATASETS, "several", several)
    config = changed(taught, data__name="several", model__task="multi-label")
    with pytest.raises(UserError, match="is of single-label, and the run of multi-label"):
        train(config)


@pytest.mark.parametrize("knob", ["share", "temperature"])
def test_what_a_teacher_does_needs_one(knob, refusal):
    said = refusal("train", "smoke", f"--optim.teacher-{knob}", 0.7)
    assert f"--optim.teacher-{knob} 0.7 needs --optim.teacher RUN" in said


def test_a_teacher_has_the_share_and_the_temperature_that_are_given(taught, monkeypatch):
    teacher = Mock(side_effect=UserError("enough"))
    monkeypatch.setattr(loss, "Teacher", teacher)
    with pytest.raises(UserError, match="enough"):
        train(changed(taught, optim__teacher_temperature=4.0))
    assert teacher.call_args.args[:3] == (taught.optim.teacher, 0.75, 4.0)
