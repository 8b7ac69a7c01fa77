"""The preset `folder`, with mixup and CutMix."""

from dataclasses import replace

from ...config import Config


def change_preset(preset: Config, name: str) -> Config:
    """The preset `name`: `folder` with mixup and CutMix, any other as it is."""
    if name != "folder":
        return preset
    return replace(preset, augment=replace(preset.augment, mixup=0.4, cutmix=1.0))
