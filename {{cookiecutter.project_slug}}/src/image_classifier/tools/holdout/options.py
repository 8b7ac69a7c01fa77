"""`--data.groups`, `--data.test-fraction` and `--run.score-test`."""

import re
from dataclasses import dataclass

from ...errors import UserError
from ...extensions import within


@dataclass(frozen=True)
class HoldoutOptions:
    """Which images are held out."""

    groups: str = ""  # regular expression that finds the group in an image's path, such as the
    # patient, the burst or the camera: each group is in one split. '([^/]+)_[0-9]+\.' finds
    # p07 in cat/p07_3.jpg; in a table, the column `group`
    test_fraction: float = within(0.0, 0, 0.9)  # share of the images to hold out for the test,
    # if the dataset has no `test` of its own


@dataclass(frozen=True)
class ScoreOptions:
    """What is scored."""

    score_test: bool = False  # at the end, score the weights of best.pt on the test images, once;
    # so is every run with a data.test_fraction


SECTIONS = {"images": HoldoutOptions, "run": ScoreOptions}
FREE_TO_CHANGE = ()


def check(config: object) -> None:
    """Raise `UserError` for a pattern that is none."""
    try:
        pattern = re.compile(config.data.groups)
    except re.error as error:
        raise UserError(f"--data.groups {config.data.groups!a}: {error}") from error
    if pattern.groups > 1:
        raise UserError(
            f"--data.groups {config.data.groups!a} has {pattern.groups} pairs of parentheses: one "
            "at most, around the group; others begin with ?:"
        )
