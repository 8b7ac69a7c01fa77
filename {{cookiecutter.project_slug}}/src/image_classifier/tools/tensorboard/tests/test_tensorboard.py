"""TensorBoard has the curves of a run, and its confusion matrix; a run needs not ask for it."""

import os

import pytest
from conftest import changed
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from image_classifier.config import RunConfig
from image_classifier.tools.tensorboard.tracker import open_tracker
from image_classifier.train import train


def test_a_run_has_curves_its_confusion_matrix_and_its_options(config, tmp_path):
    train(changed(config, run__trackers=RunConfig.trackers))
    events = EventAccumulator(str(tmp_path / "run/tensorboard")).Reload()
    assert {"train/loss", "val/top1", "best/top1"} <= {*events.Tags()["scalars"]}
    assert "confusion" in events.Tags()["images"]
    assert events.PluginTagToContent("hparams")  # in the same run


def test_a_folder_whose_name_is_not_read_as_utf_8_is_refused_with_what_helps(tmp_path):
    with pytest.raises(ValueError, match="name is no UTF-8: PYTHONUTF8=1, or another"):
        open_tracker(tmp_path / os.fsdecode(b"caf\xe9"), {}, 0)
