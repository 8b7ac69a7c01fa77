"""The preset `finetune`, and those that are made of it, in which lower blocks learn more slowly."""

from dataclasses import replace

from ...config import Config


def change_preset(preset: Config, name: str) -> Config:
    """The preset `name`: with layer decay, if it is `finetune` or `finetune_...`."""
    if name.partition("_")[0] != "finetune":
        return preset
    return replace(preset, optim=replace(preset.optim, layer_decay=0.8))
