"""TensorBoard has the curves of a run, and its confusion matrix; a run needs not ask for it."""

import itertools
import os

import pytest
from conftest import changed
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from image_classifier.config import RunConfig
from image_classifier.tools.tensorboard.tracker import open_tracker
from image_classifier.train import train


def test_a_run_has_curves_its_confusion_matrix_and_its_options(config, tmp_path):
    train(changed(config, run__trackers=RunConfig.trackers))
    events = EventAccumulator(str(tmp_path / "run/tensorboard")).Reload()
    assert {"train/loss", "val/top1", "best/top1"} <= {*events.Tags()["scalars"]}
    assert "confusion" in events.Tags()["images"]
    assert events.PluginTagToContent("hparams")  # in the same run


def test_a_run_that_goes_on_after_its_last_checkpoint_shows_each_step_once(tmp_path, monkeypatch):
    clock = itertools.count(1e9)
    monkeypatch.setattr(event_file_writer.time, "time", lambda: next(clock))  # files have an order
    for start, steps in ((0, (1, 2, 3, 4)), (2, (3, 4, 5))):
        tracker = open_tracker(tmp_path, {}, start)
        for step in steps:
            tracker.log(step, {"train/loss": float(start)})
        tracker.close(False)
    rows = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("train/loss")
    assert [(row.step, row.value) for row in rows] == [(1, 0), (2, 0), (3, 2), (4, 2), (5, 2)]


def test_a_folder_whose_name_is_not_read_as_utf_8_is_refused_with_what_helps(tmp_path):
    with pytest.raises(ValueError, match="name is no UTF-8: PYTHONUTF8=1, or another"):
        open_tracker(tmp_path / os.fsdecode(b"caf\xe9"), {}, 0)
