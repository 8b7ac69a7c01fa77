"""The preset `folder`, with TrivialAugment."""

from dataclasses import replace

from ...config import Config


def change_preset(preset: Config, name: str) -> Config:
    """The preset `name`: `folder` with TrivialAugment, any other as it is."""
    if name != "folder":
        return preset
    return replace(preset, augment=replace(preset.augment, policy="trivialaugment"))
