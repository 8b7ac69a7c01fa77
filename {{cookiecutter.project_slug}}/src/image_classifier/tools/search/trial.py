"""A trial of the search: an ordinary run in a process of its own, reported to Ray Tune."""

import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from ray.tune import Trainable

from ...errors import EXIT_RESTART, UserError
from ...metrics import better
from ...runtime.files import lock_file, read_object, read_rows, write_json
from ...tasks import metric_of
from ..runs import saved_runs
from ..runs.child_runs import end_run, last_line, start_run

POLL_SECONDS = 0.1  # between two looks at a run
GRACE_SECONDS = 60.0  # for a run to save and end

Row = dict[str, Any]  # of metrics.jsonl


class RunTrial(Trainable):
    """Reports each evaluation of a run. The run is started only for those that it lacks.

    Ray may end it after any of them, and go on later: the run saves on SIGTERM, and resumes.
    """

    def setup(self, config: dict[str, Any]) -> None:
        """Begin with the run in `config["folder"]`.

        Args:
            config: `folder`, of the run; `words`, of its command line; `threads`; `epochs`, in all;
                `every`, epochs between evaluations; `unit`, epochs in a unit of the scheduler's
                time; `metric`, which decides.
        """
        self.run = config
        self.folder = Path(config["folder"])
        self.output = self.folder / "output.log"
        self.told = 0  # evaluations
        self.process: subprocess.Popen | None = None
        self.began = time.monotonic()

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Become another trial, so that Ray need not start a process for each."""
        self.cleanup()
        self.setup(new_config)
        return True

    def step(self) -> dict[str, Any]:
        """Wait for the next evaluation, and report it.

        Raises:
            RuntimeError: if the run failed or its time limit ended it; with its last line.
        """
        looked = time.monotonic()
        while not (found := self.look()):
            # At most 2 % of a core for rows that are many.
            time.sleep(max(POLL_SECONDS, 50 * (time.monotonic() - looked)))
            looked = time.monotonic()
        return found

    def look(self) -> dict[str, Any]:
        """The next evaluation, if it is there; else start the run, if it is not running."""
        # In this order: what is over has written what is read next.
        is_over = self.process is not None and self.process.poll() is not None
        is_done = status_of(self.folder).get("state") == "done"
        rows = evaluations(self.folder)
        if is_done and self.process:
            with suppress(subprocess.TimeoutExpired):  # a tracker may be uploading
                self.process.wait(GRACE_SECONDS)
        # The last row comes a moment before the run has written all and ended.
        if self.told < len(rows) and (is_done or not self.is_last(rows[self.told])):
            self.told += 1
            return self.report(rows[: self.told], is_done and self.told == len(rows))
        if is_done:  # early stopping, after a row that looked like any other
            return self.report(rows, is_done)
        if self.process is None:
            waited = time.monotonic() - self.began
            # In use by a run whose search was killed: it is saving.
            if waited > GRACE_SECONDS or not is_in_use(self.folder):
                threads = str(self.run["threads"])
                self.process = start_run(self.run["words"], self.output, OMP_NUM_THREADS=threads)
        elif is_over:
            code = self.process.returncode
            said = last_line(self.output)
            is_saved = code == EXIT_RESTART
            end = {"saved": said} if is_saved else {"failed": f"exit code {code}: {said}"}
            record = self.folder / "trial.json"
            write_json(record, read_object(record) | end)
            raise RuntimeError(said)
        return {}

    def is_last(self, row: Row) -> bool:
        """Whether a row is that of the last step of the run."""
        return row["step"] >= round(self.run["epochs"] * row["step"] / row["epoch"])

    def report(self, rows: list[Row], is_done: bool) -> dict[str, Any]:
        """What Ray learns after the last of `rows`: the best score so far, as best.pt has it."""
        row = rows[-1]
        best = saved_runs.best_of(rows, self.run["metric"])
        # Evaluations are counted: the steps of one are a rounded number of epochs.
        is_full = is_done and self.is_last(row)
        epochs = self.run["epochs"] if is_full else self.told * self.run["every"]
        return {
            "score": better(self.run["metric"]) * best[f"val/{self.run['metric']}"],
            "loss": best["val/loss"],
            "epoch": row["epoch"],
            "evaluations": self.told,
            "units": epochs / self.run["unit"] + 1e-9,
            "done": is_done,
            "is_run_done": is_done,  # Ray sets the other one where it ends a trial, too
        }

    def save_checkpoint(self, _: str) -> dict[str, int]:
        """End the run, whose own checkpoint has all else; Ray pauses the trial."""
        self.cleanup()
        return {"told": self.told}

    def load_checkpoint(self, checkpoint: dict[str, int]) -> None:
        """Go on after a pause."""
        self.told = checkpoint["told"]

    def cleanup(self) -> None:
        """End the run, if it is running."""
        if self.process and self.process.poll() is None:
            end_run(self.process, GRACE_SECONDS)
        self.process = None


def evaluations(folder: Path) -> list[Row]:
    """The rows of a run with scores on the validation images; none before it has begun."""
    try:
        rows = read_rows(folder / "metrics.jsonl")
    except OSError:
        return []
    return saved_runs.evaluations(rows, metric_in(folder))


def metric_in(folder: Path) -> str:
    """The metric that decides in a run; before it has begun, the usual one."""
    path = folder / "config.json"
    return metric_of(read_object(path) if path.exists() else {})


def status_of(folder: Path) -> Row:
    """A run's `state` and `step`; empty before it has begun."""
    try:
        return read_object(folder / "status.json")
    except OSError:
        return {}


def is_in_use(folder: Path) -> bool:
    """Whether a run is at work in a folder."""
    try:
        with (folder / ".lock").open("a+") as lock:
            lock_file(lock, "in use")
    except FileNotFoundError:
        return False
    except UserError:
        return True
    return False
