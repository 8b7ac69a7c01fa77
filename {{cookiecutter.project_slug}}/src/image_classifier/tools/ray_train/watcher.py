"""In a worker of Ray, each evaluation is reported to Ray, with the path of the run folder."""

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...checkpoints import TrainState
from ...runtime.files import read_rows
from ...tracking import Setup

is_worker = False  # of Ray Train; set before the run begins


@contextmanager
def watch(setup: Setup, state: TrainState) -> Iterator[Callable[[], None]]:
    """A block that reports to Ray after each evaluation; outside of its workers, nothing happens.

    Every rank reports, as Ray asks for; the metrics are those of rank 0. A report of an evaluation
    comes after the step that follows it, or at the end of the run.
    """
    if not is_worker:
        yield lambda: None
        return
    every = setup.train_data.steps_in(setup.config.run.evaluate_every_epochs)
    folder = Path(setup.config.run.dir).resolve()
    first = state.step
    reported = first

    def tell() -> None:
        nonlocal reported
        if state.step > first + 1 and state.step % every == 1 % every:
            report(folder if setup.world.is_main else None)
            reported = state.step - 1

    yield tell
    if reported < state.step:
        report(folder if setup.world.is_main else None)


def report(folder: Path | None) -> None:
    """Report the last metrics in a run folder, and a checkpoint that is the path of that folder.

    Only rank 0 has a `folder`. Ray would copy a checkpoint with weights; it restarts a run with the
    same command, and the run resumes from its own checkpoint.
    """
    from ray.train import Checkpoint, report
    from ray.train.v2.api.report_config import CheckpointUploadMode

    metrics: dict[str, Any] = {}
    checkpoint = None
    if folder is not None:
        for row in read_rows(folder / "metrics.jsonl"):
            metrics |= row
        pointer = Path(tempfile.mkdtemp(), "run.json")
        pointer.write_text(json.dumps({"run": str(folder), "step": metrics["step"]}))
        checkpoint = Checkpoint.from_directory(str(pointer.parent))
    # In a thread, which removes the pointer: Ray takes a report every two seconds.
    report(metrics, checkpoint, checkpoint_upload_mode=CheckpointUploadMode.ASYNC)
