"""Trials: each is proposed, recorded, and an ordinary run, whose evaluations are reported."""

import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from ray.tune import Trainable
from ray.tune.search import Searcher

from ...errors import EXIT_RESTART, UserError
from ...metrics import better, metric_text
from ...runtime.console import say
from ...runtime.files import read_object, read_rows, write_json
from ...runtime.machine import CORES
from ..runs import saved_runs
from ..runs.child_runs import POLL_SECONDS, end_run, last_line, start_run, wait_until_free
from .engines import GOAL, tidy
from .job import Job

RECORD = "trial.json"  # in the folder of a trial
GRACE_SECONDS = 60.0  # for a run to save and end

Row = dict[str, Any]  # of metrics.jsonl


class Proposals(Searcher):
    """What an engine proposes, with the folder of each trial, in which it is recorded."""

    def __init__(self, engine: Searcher, job: Job) -> None:
        """Nothing is proposed yet."""
        super().__init__(**GOAL)
        self.engine = engine
        self.job = job
        self.folders: dict[str, Path] = {}  # of each trial, in the order of the proposals
        self.known: dict[str, int] = {}  # evaluations of each trial that were there before

    def suggest(self, trial_id: str) -> dict[str, Any] | str:
        """The next trial."""
        knobs = {knob: tidy(value) for knob, value in self.engine.suggest(trial_id).items()}
        if not knobs:
            return Searcher.FINISHED
        folder = self.folders[trial_id] = self.job.recipe.folder / f"{len(self.folders):03}"
        record = read_if_there(folder / RECORD)
        if record.get("knobs") != json.loads(json.dumps(knobs)):
            remove(folder)  # a trial of other knobs
            record = {}
        self.known[trial_id] = len(evaluations(folder, self.job.metric))
        is_stopped = record.get("end") == "stopped" and self.job.options.scheduler != "none"
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / RECORD, {"knobs": knobs} | ({"end": "stopped"} if is_stopped else {}))
        return {"folder": str(folder), "knobs": knobs, "is_stopped": is_stopped}

    def on_trial_result(self, trial_id: str, result: dict[str, Any], end: str = "") -> None:
        """Print an evaluation, unless an earlier search did."""
        if result["evaluations"] > self.known[trial_id]:
            score = metric_text(self.job.metric, better(self.job.metric) * result["score"])
            say(f"{self.folders[trial_id].name}  epoch {result['epoch']:5.2f}  {score}{end}")

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Print how a trial ended, record that it was stopped, and tell the engine."""
        folder = self.folders[trial_id]
        if error:
            record = {"end": "failed", "said": "Ray ended it"} | read_if_there(folder / RECORD)
            say(f"{folder.name}  {record['end']}: {record['said']}")
        elif result:
            is_done = result["is_run_done"]
            self.on_trial_result(trial_id, result, ", done" if is_done else ", stopped")
            if not is_done:  # the same command is not to train it on
                note(folder, end="stopped")
        self.engine.on_trial_complete(trial_id, result=result, error=error)


class RunTrial(Trainable):
    """Reports each evaluation of a run. The run is started only for those that it lacks.

    Ray may end it after any of them: the run saves on SIGTERM.
    """

    def setup(self, config: dict[str, Any], job: Job) -> None:
        """Begin with the run in `folder`, of `knobs`; if it `is_stopped`, it is not trained on."""
        self.folder = Path(config["folder"])
        self.knobs = config["knobs"]
        self.is_stopped = config["is_stopped"]
        self.job = job
        self.told = 0  # evaluations
        self.process: subprocess.Popen | None = None

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Become another trial, so that Ray need not start a process for each."""
        self.cleanup()
        self.setup(new_config)  # Ray adds the job
        return True

    def step(self) -> dict[str, Any]:
        """Wait for the next evaluation, and report it; start the run if it is not there.

        Raises:
            RuntimeError: if the run failed or its time limit ended it; with its last line.
        """
        while True:
            looked = time.monotonic()
            # In this order: what is over has written what is read next.
            is_running = self.process is not None and self.process.poll() is None
            status = read_if_there(self.folder / "status.json")
            is_done = not is_running and (self.is_stopped or status.get("state") == "done")
            rows = evaluations(self.folder, self.job.metric)
            # The last row comes a moment before the run has written all and ended.
            if self.told < len(rows) and (is_done or not self.is_last(rows[self.told])):
                self.told += 1
                return self.report(rows[: self.told], is_done and self.told == len(rows))
            if is_done:  # early stopping, after a row that looked like any other
                return self.report(rows, is_done)
            if self.process is None:
                self.start()
            elif not is_running:
                code = self.process.returncode
                said = last_line(self.folder / "output.log")
                end = "saved" if code == EXIT_RESTART else "failed"
                note(self.folder, end=end, said=f"exit code {code}: {said}")
                raise RuntimeError(said)
            # At most 2 % of a core for rows that are many.
            time.sleep(max(POLL_SECONDS, 50 * (time.monotonic() - looked)))

    def start(self) -> None:
        """Start the run, once one whose search was killed has saved."""
        wait_until_free(self.folder, GRACE_SECONDS)
        own = self.knobs | {"run.evaluate_every_epochs": self.job.every}
        words = self.job.recipe.words(self.folder.name, own)
        cores = self.job.options.cpus
        threads = max(1, cores // self.job.recipe.config.run.processes)  # of each process
        shares = {CORES: str(cores), "OMP_NUM_THREADS": str(threads)}
        self.process = start_run(words, self.folder / "output.log", **shares)

    def is_last(self, row: Row) -> bool:
        """Whether a row is that of the last step of the run."""
        return row["step"] >= round(self.job.options.epochs * row["step"] / row["epoch"])

    def report(self, rows: list[Row], is_done: bool) -> dict[str, Any]:
        """What Ray learns after the last of `rows`: the best score so far of trained weights."""
        metric = self.job.metric
        epochs = self.job.options.epochs
        # Evaluations are counted: the steps of one are a rounded number of epochs. At the last rung
        # Ray ends a trial, which is for the run to do.
        planned = min(self.told * self.job.every + 1e-9, epochs * (1 - 1e-6))
        return {
            "score": max(better(metric) * row[f"val/{metric}"] for row in rows),
            "epoch": rows[-1]["epoch"],
            "evaluations": self.told,
            "planned_epoch": epochs if is_done else planned,
            "done": is_done,
            "is_run_done": is_done,  # Ray sets the other one where it ends a trial, too
        }

    def cleanup(self) -> None:
        """End the run, if it is running."""
        if self.process and self.process.poll() is None:
            end_run(self.process, GRACE_SECONDS)
        self.process = None


def remove(folder: Path) -> None:
    """Remove the folder of a trial, if it is there, once no run is at work in it.

    Its record goes last: what has none is no trial's.

    Raises:
        UserError: if a run is at work there, or it is no trial's.
    """
    if not wait_until_free(folder, GRACE_SECONDS):
        raise UserError(f"{str(folder)!a} is in use by a run of an earlier search: end it first")
    found = sorted(folder.glob("*"), key=lambda path: path.name == RECORD)
    if found and found[-1].name != RECORD:
        raise UserError(f"{str(folder)!a} is no trial's: move it, or take another --run.dir")
    for path in found:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def note(folder: Path, **more: Any) -> None:  # noqa: ANN401 - of JSON
    """Add to the record of a trial: `knobs`, its `end` (stopped, saved, failed), what it `said`."""
    write_json(folder / RECORD, read_if_there(folder / RECORD) | more)


def read_if_there(path: Path) -> dict[str, Any]:
    """The object in a file; empty without the file."""
    return read_object(path) if path.exists() else {}


def evaluations(folder: Path, metric: str) -> list[Row]:
    """The rows of a run with scores on the validation images; none before it has begun.

    Without those of the weights that it began with, as no step has made them.
    """
    path = folder / "metrics.jsonl"
    rows = read_rows(path) if path.exists() else []
    return [row for row in saved_runs.evaluations(rows, metric) if row["step"]]
