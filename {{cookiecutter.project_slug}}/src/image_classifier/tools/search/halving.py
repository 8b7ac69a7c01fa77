"""ASHA that pauses: asynchronous successive halving, https://arxiv.org/abs/1810.05934.

Ray's own `ASHAScheduler` never pauses a trial. It lets each go on that is among the best so far,
as the first ones always are, and so trains about twice as many steps. Here a trial goes on as soon
as those that are still to reach its rung can't take its place, so the number of steps is known
before: see `benchmarks/search.py`.
"""

from typing import TYPE_CHECKING, Any

from ray.tune.experiment import Trial
from ray.tune.schedulers import FIFOScheduler, TrialScheduler

if TYPE_CHECKING:
    from ray.tune.execution.tune_controller import TuneController


class PausingASHA(FIFOScheduler):
    """Pauses trials at rungs; once all are proposed, the best of each rung go on.

    One trial in `reduction` of those that reach a rung passes it, and at least one trial of all is
    trained to the end.
    """

    def __init__(self, units: float, reduction: int) -> None:
        """Rungs are at 1, `reduction`, `reduction`^2, ... units of time; a run has `units`."""
        super().__init__()
        self.reduction = reduction
        self.rungs: list[tuple[float, dict[Trial, float]]] = [(1.0, {})]  # time, scores of trials
        while self.rungs[-1][0] * reduction < units:
            self.rungs.append((self.rungs[-1][0] * reduction, {}))

    def on_trial_result(
        self, tune_controller: "TuneController", trial: Trial, result: dict[str, Any]
    ) -> str:
        """Pause a trial that reaches a rung, unless it may go on at once."""
        is_reached = False
        for time, scores in self.rungs:
            if result["units"] >= time and trial not in scores:
                scores[trial] = result["score"]
                is_reached = True
        search = tune_controller.search_alg
        if not is_reached or trial in self.promotable(tune_controller):
            return TrialScheduler.CONTINUE
        search.searcher.on_pause(trial.trial_id)
        return TrialScheduler.PAUSE

    def promotable(self, tune_controller: "TuneController") -> list[Trial]:
        """Trials that are among the best of the last rung that they reached, the furthest first.

        They are so whatever the score of those that are yet to reach it.
        """
        if not tune_controller.search_alg.is_finished():
            return []  # new trials are about to be proposed
        found: list[Trial] = []
        reaching = sum(trial.status != Trial.ERROR for trial in tune_controller.get_trials())
        for _, scores in self.rungs:
            ranked = sorted(scores, key=lambda trial: scores[trial], reverse=True)
            missing = reaching - len(scores)
            passing = reaching // self.reduction
            found = ranked[: max(0, passing - missing)] + [t for t in found if t not in scores]
            reaching = passing
        return found

    def choose_trial_to_run(self, tune_controller: "TuneController") -> Trial | None:
        """A new trial, else a paused one that may go on; at the end, stop the others."""
        trials = tune_controller.get_trials()
        if pending := [trial for trial in trials if trial.status == Trial.PENDING]:
            return pending[0]
        paused = [t for t in trials if t.status == Trial.PAUSED and not t.is_saving]
        if not tune_controller.search_alg.is_finished():
            return None  # a new trial is about to be proposed
        chosen = [trial for trial in self.promotable(tune_controller) if trial in paused]
        num_finished = sum(trial.is_finished() for trial in trials)
        is_idle = len(paused) + num_finished == len(trials)
        if not chosen and paused and is_idle:
            if any(trial.status == Trial.TERMINATED for trial in trials):
                for trial in paused:
                    tune_controller.stop_trial(trial)
                return None
            chosen = [max(paused, key=self.place)]
        for trial in chosen[:1]:
            tune_controller.search_alg.searcher.on_unpause(trial.trial_id)
            return trial
        return None

    def place(self, trial: Trial) -> tuple[float, float]:
        """The time of the last rung that a trial reached, and its score there."""
        return max((time, scores[trial]) for time, scores in self.rungs if trial in scores)
