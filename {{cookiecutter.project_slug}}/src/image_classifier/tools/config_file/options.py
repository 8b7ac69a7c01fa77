"""`--config`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ConfigFileOptions:
    """Which file has values of options."""

    config: str = ""  # file of options, which flags override: the config.json of a run, or its
    # folder; or your own JSON, TOML or YAML file, which overrides the preset


SECTIONS = {"": ConfigFileOptions}
FREE_TO_CHANGE = ("config",)
