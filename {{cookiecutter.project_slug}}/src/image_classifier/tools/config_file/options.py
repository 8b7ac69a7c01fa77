"""`--config`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ConfigFileOptions:
    """Which file has values of options."""

    config: str = ""  # file of options, under the flags and over the preset: the config.json of a
    # run, or its folder; or a file of your own, as JSON, TOML or YAML


SECTIONS = {"": ConfigFileOptions}
FREE_TO_CHANGE = ("config",)
