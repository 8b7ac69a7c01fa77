"""Trackers get what a run measures; they can't end it, and are told no secrets."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import changed

from image_classifier.errors import UserError
from image_classifier.tracking import trackers
from image_classifier.tracking.trackers import (
    Tracker,
    Trackers,
    check_trackers,
    confusion_image,
    public_knobs,
)


def test_if_a_tracker_fails_the_others_go_on_and_one_line_says_so(config, tmp_path, monkeypatch):
    logged = {"tensorboard": [], "trackio": []}

    def failing(*_):
        def log(step, _):
            logged["trackio"].append(step)
            if step == 2:
                raise RuntimeError("no space\x1b[2J left\nand more")

        return Tracker(log)

    def closed(*_):
        raise OSError("no network")

    sound = Tracker(lambda step, _: logged["tensorboard"].append(step))
    table = {"tensorboard": lambda *_: sound, "trackio": failing, "wandb": closed}
    monkeypatch.setattr(trackers, "find_trackers", lambda: table)
    said = []
    opened = Trackers(said.append)
    names = ("wandb", "trackio", "tensorboard", "tensorboard")
    opened.begin(changed(config, run__trackers=names), tmp_path, 0)
    for step in (1, 2, 3):
        opened.tell("log", step, {"val/top1": 0.5})
    opened.tell("close", True)
    assert logged == {"tensorboard": [1, 2, 3], "trackio": [1, 2]}
    end = "metrics.jsonl has all metrics"
    assert said == [
        f"wandb failed, training continues: no network; {end}",
        f"trackio failed, training continues: no space\\x1b[2J left; {end}",
    ]


def test_an_unknown_tracker_and_one_without_its_library_are_refused(monkeypatch):
    tool = SimpleNamespace(open_tracker=None, LIBRARY="no_such_library")
    monkeypatch.setattr(trackers, "find_tools", lambda module: {f"my-{module}": tool})
    check_trackers(["tensorboard"])
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
