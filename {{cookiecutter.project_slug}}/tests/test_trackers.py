"""What a run measures: its speed, its memory, and what trackers get, which can't end it."""

import json
import re
import resource
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call

import numpy as np
import pytest
import torch
from conftest import changed

from image_classifier.errors import UserError
from image_classifier.models.resnet9 import ResNet9
from image_classifier.runtime.tools import find_tools
from image_classifier.tracking import logger, trackers
from image_classifier.tracking.trackers import (
    Tracker,
    Trackers,
    check_trackers,
    confusion_image,
    public_knobs,
)
from image_classifier.train import train


def test_the_first_step_is_not_in_the_speed_as_it_compiles(config, monkeypatch, capsys):
    forward, seconds = ResNet9.forward, [0.0]

    def forward_slowly_at_first(model, images):
        seconds[0] += 1 if seconds[0] else 100
        return forward(model, images)

    monkeypatch.setattr(ResNet9, "forward", forward_slowly_at_first)
    monkeypatch.setattr(logger.time, "monotonic", lambda: seconds[0])
    train(changed(config, epochs=1, run__log_every_steps=1))
    rows = map(json.loads, Path(config.run.dir, "metrics.jsonl").read_text().splitlines())
    first, row, *_ = rows
    assert "train/images_per_second" not in first
    assert row["train/images_per_second"] == 16  # a step each second, of 16 images
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert most / 2 < row["memory_bytes"] <= most
    said = capsys.readouterr().out
    observers = find_tools("observer").keys()  # each may be deleted
    if "bottleneck" in observers:
        assert "  The model is the limit: 16 images/s. " in said
    if observers >= {"bottleneck", "flops"}:
        assert re.search(r"is the limit: .* MFU \d+%\.", said)
    for words in (" 1 process, ", ", fp32; as --precision says; seed 0: ", "  ETA 0:00\n"):
        assert words in said


def test_if_a_tracker_fails_the_others_go_on_and_one_line_says_so(config, tmp_path, monkeypatch):
    sound, failing = Mock(), Mock(side_effect=[0, RuntimeError("no space\x1b[2J left\nand more")])
    table = {
        "tensorboard": lambda *_: Tracker(sound),
        "trackio": lambda *_: Tracker(failing),
        "wandb": Mock(side_effect=OSError("no network")),
    }
    monkeypatch.setattr(trackers, "find_trackers", lambda: table)
    said, names = [], ("wandb", "trackio", "tensorboard", "tensorboard")
    opened = Trackers(said.append)
    opened.begin(changed(config, run__trackers=names), tmp_path, 0)
    for step in (1, 2, 3):
        opened.tell("log", step, {})
    opened.tell("close", True)
    assert sound.mock_calls == [call(1, {}), call(2, {}), call(3, {})]
    assert failing.mock_calls == [call(1, {}), call(2, {})]
    end = "metrics.jsonl has all metrics"
    assert said == [
        f"wandb failed, training continues: no network; {end}",
        f"trackio failed, training continues: no space\\x1b[2J left; {end}",
    ]


def test_an_unknown_tracker_and_one_without_its_library_are_refused(monkeypatch):
    tool = SimpleNamespace(open_tracker=None, LIBRARY="no_such_library")
    monkeypatch.setattr(trackers, "find_tools", lambda module: {f"my-{module}": tool})
    with pytest.raises(UserError, match=r"my-tracker needs a library: pip install no_such_library"):
        check_trackers(["tensorboard", "my-tracker"])
    said = r"no tracker 'mytracker'; there are: tensorboard, my-tracker; did you mean my-tracker\?"
    with pytest.raises(UserError, match=said):
        check_trackers(["mytracker"])


def test_knobs_are_public_without_paths(config):
    config = changed(config, data__root="/home/planted/images", run__init_from="planted.pt")
    knobs = public_knobs(config)
    assert "planted" not in str(knobs)
    assert (knobs["optim.lr"], knobs["compute.compile"]) == (0.02, False)


def test_a_cell_of_a_confusion_matrix_is_the_darker_the_larger_its_share():
    image = confusion_image(torch.tensor([[9, 1, 0], [0, 0, 0], [0, 0, 5]]))
    assert (image.dtype, image.shape) == (np.uint8, (510, 510, 3))
    cells = image[::170, ::170, 0].tolist()
    assert cells == [[13, 174, 255], [255, 255, 255], [255, 255, 0]]
