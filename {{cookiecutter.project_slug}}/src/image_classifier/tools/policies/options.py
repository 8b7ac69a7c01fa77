"""`--augment.policy`."""

import re
from dataclasses import dataclass

from ...errors import UserError

POLICY = re.compile(r"none|trivialaugment|randaugment(-m([1-2]?\d|30))?(-n([1-9]|10))?")


@dataclass(frozen=True)
class PolicyOptions:
    """Which operations change training images at random."""

    policy: str = "none"  # trivialaugment, or randaugment-m9-n2: magnitude 9 (of 30), 2 operations


SECTIONS = {"augment": PolicyOptions}
FREE_TO_CHANGE = ()


def check(config: object) -> None:
    """Raise `UserError` for a policy that there is not."""
    policy = config.augment.policy
    if not POLICY.fullmatch(policy):
        raise UserError(
            f"--augment.policy {policy!a} is none of: none, trivialaugment, randaugment, "
            "randaugment-m9-n2 (-m: 0 .. 30, -n: 1 .. 10)"
        )
