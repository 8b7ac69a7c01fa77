"""What a checkpoint holds is checked where it is read, and it is read at once."""

import math
import re
from pathlib import Path

import pytest
import torch

from image_classifier.checkpoints import load_model
from image_classifier.checkpoints.reading import read_checkpoint
from image_classifier.config import ComputeConfig
from image_classifier.errors import UserError
from image_classifier.runtime.distributed import World
from image_classifier.train import train

OTHER = "is not a checkpoint of this project: "
VERSION = "is of another version of this project: "


def put(saved, place, value):
    """`saved` with another value at a place such as `state/step`."""
    key, _, rest = place.partition("/")
    return saved | {key: put(saved[key], rest, value) if rest else value}


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("state", ["model"], f"{OTHER}TypeError"),
        ("state/step", -7, f"{OTHER}ValueError('step is -7')"),
        ("state/best_score", None, f"{OTHER}TypeError('best_score is None, not of type float')"),
        ("report", {"loss": 0.0}, f"{OTHER}KeyError('step')"),
        ("state/model", {0: torch.zeros(4)}, "0 is not a dense tensor"),
        ("state/model", {}, f"{OTHER}ValueError('there are no weights')"),
        ("state/model", {"w": torch.eye(4).to_sparse()}, "w' is not a dense tensor"),
        ("state/model", {"w": torch.zeros(4, device="meta")}, "w' is not a dense tensor"),
        ("classes", [5], f"{OTHER}ValueError('its classes are not names')"),
        ("std", [0.5, 0.0, 0.5], f"{OTHER}ValueError('no images have"),
        ("mean", [0.5, 1e308, 1e308], f"{OTHER}ValueError('no images have"),
        ("mean", [0.5, math.nan, 0.5], f"{OTHER}ValueError('no images have"),
        ("config/model.keep", 2, f"{VERSION}it was trained with --model.keep 2, of a tool"),
        ("config/epochs", math.nan, f"{VERSION}--epochs nan"),
        ("config/model.width", "__import__('os')", f"{VERSION}Error parsing --model.width: "),
        ("config/run.trackers", ["--help"], f"{VERSION}help is not a knob"),
    ],
)
def test_what_no_run_saved_is_refused_in_a_line(
    trained_once, tmp_path, refusal, *, place, value, message
):
    path = tmp_path / "best.pt"
    torch.save(put(read_checkpoint(trained_once / "checkpoints" / "best.pt"), place, value), path)
    with pytest.raises(UserError, match=re.escape(message)):
        read_checkpoint(path)
    assert message in refusal("train", "smoke", "--run.init-from", path, "--run.dir", tmp_path)


MOMENTUM = {"momentum_buffer": torch.zeros(3)}  # of a smaller weight than any of the model


@pytest.mark.parametrize(
    ("place", "value"),
    [("state", {0: MOMENTUM}), ("state", {999: MOMENTUM}), ("param_groups", [{"params": [0]}])],
)
def test_an_optimizer_state_of_other_weights_is_refused(finished, place, value):
    path = Path(finished.run.dir, "checkpoints", "last.pt")
    torch.save(put(read_checkpoint(path), f"state/optimizer/{place}", value), path)
    with pytest.raises(UserError, match=r"holds another model: .*--run.fresh"):
        train(finished)


def test_a_checkpoint_that_differs_from_machine_to_machine_is_refused(trained_once, monkeypatch):
    monkeypatch.setattr(World, "is_same", lambda *_: False)
    with pytest.raises(UserError, match="is not the same file for all ranks"):
        load_model(str(trained_once), ComputeConfig(), World(torch.device("cpu")))
