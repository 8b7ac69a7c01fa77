"""Where a model comes from: its network, the weights that it began with, and its command line."""

import shlex
from pathlib import PurePath
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from ...config import Config
from ...models import find_library, models_by_name, published_weights
from ...runtime.command_line import command
from ...runtime.config_dict import flatten, words_of
from ..config_file.reproduce import flags_for
from .markup import escape

# Knobs of the machine, or of how a run is started, which change no result.
OF_MACHINE = ("compute.", "data.cache", "data.prefetch_batches", "data.where", "data.workers")
OF_MACHINE += ("config", "run.dir", "run.fresh", "run.log_every_steps", "run.processes")
OF_MACHINE += ("run.timeout_seconds", "run.trackers")
PATHS = ("data.labels", "data.root", "optim.teacher", "run.init_from")


class Base(NamedTuple):
    """The weights that a run began with."""

    text: str  # what they are, in Markdown
    license: str  # what is known of their license, a sentence in Markdown
    hub: str = ""  # their name on Hugging Face


def library_of(name: str) -> str:
    """The library of the network `name`, or nothing if it is one of this project."""
    library, is_theirs, _ = name.partition("/")
    if is_theirs:
        return library
    return "" if name in models_by_name() else "torchvision"


def base_of(config: Config) -> Base:
    """The weights that a run began with, and what their library says of their license."""
    name = config.model.name
    init_from = config.run.init_from
    if not init_from:
        return Base("random weights", "It began with random weights.")
    if init_from != "pretrained":
        text = f"the weights of the file {escape(public(init_from))}"
        return Base(text, f"It began with {text}, whose license the run does not know.")
    if networks := find_library(name):
        return of_library(name, networks.pretrained_config(name))
    known = published_weights(name)
    text = f"{escape(str(known))} of torchvision"
    how = f"how they were made: {known.meta['recipe']}"
    return Base(text, f"It began with {text}, which names no license of its weights; {how}.")


def of_library(name: str, known: Any) -> Base:  # noqa: ANN401 - what the library knows of them
    """The weights of another library's network `name`, as timm describes its own."""
    text = f"the weights of {escape(name)}"
    named = getattr(known, "license", None)
    hub = getattr(known, "hf_hub_id", None) or ""
    where = f"https://huggingface.co/{hub}" if hub else getattr(known, "origin_url", None)
    license_ = f"license: {escape(named)}" if named else "no license is named"
    return Base(text, f"It began with {text}; {license_}; see {where}.", hub)


def command_line(config: Config) -> str:
    """The command that trains with `config`, as `reproduce` finds it, without the machine's knobs.

    Of a path that begins at the root, only its end is told.
    """
    name, changed = flags_for(config)
    told = {
        knob: public(value) if knob in PATHS else value
        for knob, value in changed.items()
        if not knob.startswith(OF_MACHINE)
    }
    return shlex.join([*command("train").split(), name, *words_of(told)])


def has_whole_paths(config: Config) -> bool:
    """Whether `command_line` shortens a path."""
    knobs = flatten(config)
    return any(public(knobs[knob]) != knobs[knob] for knob in PATHS if knob in knobs)


def public(path: str) -> str:
    """A path or an address without what it tells of the machine, or of who may read there."""
    if "://" in path:
        address = urlsplit(path)
        return PurePath(address.path).name or address.hostname or address.scheme
    return PurePath(path).name if PurePath(path).is_absolute() else path
