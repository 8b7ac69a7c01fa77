"""`--run.min-precision` and `--run.error-cost`."""

from dataclasses import dataclass

from ...errors import UserError
from ...extensions import within


@dataclass(frozen=True)
class CalibrationOptions:
    """When a prediction counts."""

    min_precision: float = within(0.0, 0, 1)  # abstain: the share of predictions that should be
    # right; the validation images choose the probability from which on predictions count, for
    # multi-label one for each label; 0: all count
    error_cost: float = within(0.0, 0)  # abstain: what a wrong prediction costs, if abstaining
    # costs 1; 0: all count


SECTIONS = {"run": CalibrationOptions}
FREE_TO_CHANGE = ()


def check(config: object) -> None:
    """Raise `UserError` for two of them at once, a cost that asks for errors, or one of labels."""
    run = config.run
    cost = run.error_cost
    if cost and config.model.task == "multi-label":
        raise UserError("--run.error-cost is for single-label images; take --run.min-precision")
    if cost and run.min_precision:
        raise UserError("give --run.error-cost or --run.min-precision, not both")
    if 0 < cost < 1:
        raise UserError(f"--run.error-cost {cost:g} should be 1 or more, as an abstention costs 1")
