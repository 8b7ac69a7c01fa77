"""`--run.trackers tensorboard`."""

from pathlib import Path

from ...metrics import Predictions
from ...tracking import Knobs, Metrics, Tracker
from ..pictures.pictures import pictures_of

IS_DEFAULT = True


def open_tracker(folder: Path, knobs: Knobs, start_step: int) -> Tracker:
    """TensorBoard: curves, images and hyper-parameters; it hides rows after the last checkpoint."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from torch.utils.tensorboard import SummaryWriter
    from torch.utils.tensorboard.summary import hparams

    if str(folder).encode(errors="ignore").decode() != str(folder):  # the library opens no others
        raise ValueError("the run folder's name is no UTF-8: PYTHONUTF8=1, or another --run.dir")
    # Its thread writes to the disk once per second: to wait for it takes as long as a step.
    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=start_step + 1, flush_secs=1)
    seen: Metrics = {}

    def log(step: int, metrics: Metrics) -> None:
        seen.update(metrics)
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        writer.file_writer.add_summary(Summary(value=values), step)  # one event, not one for each

    def finish(step: int, predictions: Predictions) -> None:
        for name, pixels in pictures_of(predictions).items():
            writer.add_image(name, pixels, step, dataformats="HWC")

    def close(is_done: bool) -> None:
        if is_done:  # `add_hparams` would make a second run, and takes a bool for a number
            words = {knob: str(v) if isinstance(v, bool) else v for knob, v in knobs.items()}
            for summary in hparams(words, dict.fromkeys(seen)):
                writer.file_writer.add_summary(summary)
        writer.close()

    return Tracker(log, finish, close)
