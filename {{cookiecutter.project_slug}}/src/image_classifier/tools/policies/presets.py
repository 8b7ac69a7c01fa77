"""The preset `folder`, with TrivialAugment."""

from dataclasses import replace

from ... import presets
from ...config import Config


def folder() -> Config:
    """Your own photographs, from scratch: `--data.root FOLDER`."""
    plain = presets.folder()
    return replace(plain, augment=replace(plain.augment, policy="trivialaugment"))


PRESETS = (folder,)
