"""How many steps a run has, and what is due after which of them."""

from .config import RunConfig
from .data import TrainData


class Plan:
    """What is due after a step, counted from the start of the run; at its end all is."""

    def __init__(self, run: RunConfig, data: TrainData) -> None:
        """Of a run on `data`."""
        self.steps_per_epoch, self.total_steps = data.steps_per_epoch, data.total_steps
        self.log_every = run.log_every_steps
        self.evaluate_every = data.steps_in(run.evaluate_every_epochs)
        self.save_every = run.save_every_steps or self.evaluate_every

    def logs_after(self, step: int) -> bool:
        """Whether to show progress: at the end of each epoch too."""
        return self._is_due(step, self.log_every) or self._is_due(step, self.steps_per_epoch)

    def evaluates_after(self, step: int) -> bool:
        """Whether to evaluate."""
        return self._is_due(step, self.evaluate_every)

    def saves_after(self, step: int) -> bool:
        """Whether to save a checkpoint."""
        return self._is_due(step, self.save_every)

    def _is_due(self, step: int, every: int) -> bool:
        return step == self.total_steps or step % every == 0
