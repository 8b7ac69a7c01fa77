"""`--optim.teacher`, and how much it counts."""

from dataclasses import dataclass

from ...errors import UserError
from ...extensions import flag, within


@dataclass(frozen=True)
class DistillOptions:
    """Who gives a part of the targets."""

    teacher: str = ""  # distillation: run folder or checkpoint of a trained model whose predictions
    # for the augmented images are a part of the targets: https://arxiv.org/abs/2106.05237
    teacher_share: float = within(0.5, 0, 1)  # teacher's share of the targets; labels are the rest
    teacher_temperature: float = within(1.0, 0.01, 100)  # of the teacher's softmax; above 1,
    # less probable classes count more


SECTIONS = {"optim": DistillOptions}
FREE_TO_CHANGE = ()


def check(config: object) -> None:
    """Raise `UserError` for what a teacher should do where there is none."""
    optim = config.optim
    for name in ("teacher_share", "teacher_temperature"):
        value = getattr(optim, name)
        if not optim.teacher and value != getattr(DistillOptions, name):
            raise UserError(f"--optim.{flag(name)} {value:g} needs --optim.teacher RUN")
