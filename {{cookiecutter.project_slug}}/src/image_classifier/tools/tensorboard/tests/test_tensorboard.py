"""TensorBoard has the curves of a run, and its confusion matrix; a run needs not ask for it."""

from conftest import changed
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from image_classifier.config import RunConfig
from image_classifier.train import train


def test_a_run_has_curves_its_confusion_matrix_and_its_options(config, tmp_path):
    train(changed(config, run__trackers=RunConfig.trackers))
    events = EventAccumulator(str(tmp_path / "run/tensorboard")).Reload()
    assert {"train/loss", "val/top1", "best/top1"} <= {*events.Tags()["scalars"]}
    assert "confusion" in events.Tags()["images"]
    assert events.PluginTagToContent("hparams")  # in the same run
