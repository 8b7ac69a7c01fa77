"""`--run.finish-in-time`."""

from dataclasses import dataclass

from ...errors import UserError
from ...extensions import option


@dataclass(frozen=True)
class TimeOptions:
    """What the time limit means."""

    finish_in_time: bool = False  # max_minutes limits the whole run, with all its resumes: the
    # learning rate decays by the clock, and the run ends in time; it can't be repeated exactly


SECTIONS = {"run": TimeOptions}
FREE_TO_CHANGE = ()


def check(config: object) -> None:
    """Raise `UserError` for a run without a limit, or of images that grow step by step."""
    run = config.run
    if run.finish_in_time and not run.max_minutes:
        raise UserError("--run.finish-in-time needs the time, --run.max-minutes")
    if run.finish_in_time and option(config, "augment.min_size", 0):
        raise UserError("--run.finish-in-time needs images of one size: --augment.min-size 0")
