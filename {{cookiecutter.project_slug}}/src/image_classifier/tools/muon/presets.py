"""The preset `folder`, with Muon."""

from dataclasses import replace

from ...config import Config


def change_preset(preset: Config, name: str) -> Config:
    """The preset `name`: `folder` with Muon, any other as it is."""
    if name != "folder":
        return preset
    return replace(preset, optim=replace(preset.optim, name="muon", lr=2e-3))
