"""The trials that an engine proposes: each is recorded, and its evaluations are printed."""

from pathlib import Path
from typing import Any

from ray.tune.search import Searcher

from ...metrics import better, metric_text
from ...runtime.console import say
from ...runtime.files import write_json
from ...tasks import metric_of
from .engines import GOAL, tidy
from .job import Job
from .results import read_record, trial_folder
from .trial import evaluations


class Proposals(Searcher):
    """What an engine proposes, with the folder of each trial, in which it is recorded."""

    def __init__(self, engine: Searcher, job: Job, folder: Path) -> None:
        """Nothing is proposed yet."""
        super().__init__(**GOAL)
        self.engine = engine
        self.job = job
        self.folder = folder
        self.folders: dict[str, Path] = {}  # of each trial, in the order of the proposals
        self.known: dict[str, int] = {}  # evaluations of each trial that were there before
        self.running: set[str] = set()
        self.completed: set[str] = set()  # trials as the engine has it

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """The next trial; None: not yet."""
        if len(self.running) >= self.job.at_once:
            return None
        knobs = self.engine.suggest(trial_id)
        if not isinstance(knobs, dict):
            return knobs
        knobs = {knob: tidy(value) for knob, value in knobs.items()}
        self.running.add(trial_id)
        folder = self.folders[trial_id] = trial_folder(self.folder, len(self.folders))
        self.known[trial_id] = len(evaluations(folder))
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "trial.json", {"knobs": knobs})
        return self.job.trial(folder, knobs)

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Print an evaluation, and pass it to the engine.

        To the engine a trial ends at its first pause: TPE is to compare trials at the same place.
        """
        is_paused = trial_id not in self.running
        self.tell(trial_id, result, ", paused" if is_paused else "")
        if is_paused:
            self.complete(trial_id, result=result)
        elif trial_id not in self.completed:
            self.engine.on_trial_result(trial_id, result)

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Print how a trial ended, and pass that to the engine."""
        self.running.discard(trial_id)
        self.complete(trial_id, result=result, error=error)
        if error:
            record = read_record(self.folders[trial_id])
            failed = f"failed: {record.get('failed', 'Ray ended it')}"
            say(f"{self.name(trial_id)}  {record.get('saved', failed)}")
        elif result:
            self.tell(trial_id, result, ", done" if result["is_run_done"] else ", stopped")

    def complete(self, trial_id: str, **outcome: Any) -> None:  # noqa: ANN401
        """Tell the engine once that a trial is complete."""
        if trial_id not in self.completed:
            self.completed.add(trial_id)
            self.engine.on_trial_complete(trial_id, **outcome)

    def tell(self, trial_id: str, result: dict[str, Any], end: str) -> None:
        """Print an evaluation, unless an earlier search did."""
        if result["evaluations"] > self.known[trial_id]:
            metric = metric_of(self.job.config)
            score = metric_text(metric, better(metric) * result["score"])
            say(f"{self.name(trial_id)}  epoch {result['epoch']:5.2f}  {score}{end}")

    def name(self, trial_id: str) -> str:
        """How a line names a trial."""
        return str(self.folders[trial_id].relative_to(self.folder.parent))

    def on_pause(self, trial_id: str) -> None:
        """Note that a trial does not run, as schedulers say that pause some."""
        self.running.discard(trial_id)

    def on_unpause(self, trial_id: str) -> None:
        """Note that a trial runs again."""
        self.running.add(trial_id)

    def save(self, checkpoint_path: str) -> None:
        """Leave it at the records of the trials."""
