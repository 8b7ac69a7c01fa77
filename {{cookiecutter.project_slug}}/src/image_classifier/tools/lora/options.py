"""`--model.lora-rank`."""

from dataclasses import dataclass

from ...errors import UserError
from ...extensions import within


@dataclass(frozen=True)
class LoraOptions:
    """Which weights learn."""

    lora_rank: int = within(0, 0, 1024)  # fine-tune only the last layer and, beside each matrix, a
    # product of two of this rank (LoRA): https://arxiv.org/abs/2106.09685; 0: all weights


SECTIONS = {"model": LoraOptions}
FREE_TO_CHANGE = ()


def check(config: object) -> None:
    """Raise `UserError` for adapters beside weights that have learned nothing."""
    if config.model.lora_rank and not config.run.init_from:
        raise UserError(
            f"--model.lora-rank {config.model.lora_rank} trains only some layers, on top of "
            "pretrained weights: --run.init-from FILE or pretrained"
        )
