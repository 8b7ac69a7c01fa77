"""Trackers get what a run measures; they can't end it, and are told no secrets."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import changed

from image_classifier.config import Config
from image_classifier.errors import UserError
from image_classifier.tracking import trackers
from image_classifier.tracking.trackers import (
    Tracker,
    Trackers,
    check_installed,
    confusion_image,
    public_knobs,
)


class Library(ModuleType):
    """Stands in for wandb: remembers what it was told."""

    def __init__(self, has_key: bool) -> None:
        """On a machine that has a key for it, or none."""
        super().__init__("wandb")
        self.has_key = has_key
        self.options: dict[str, Any] = {}
        self.Settings = dict

    def login(self, prompt: bool, verify: bool) -> bool:
        """Whether there is a key; never ask for one."""
        assert not prompt
        assert not verify
        return self.has_key

    def init(self, **options: Any) -> SimpleNamespace:  # noqa: ANN401
        """Begin a run."""
        self.options = options
        return SimpleNamespace(offline=options["mode"] == "offline", url="https://example.com/run")


def test_if_a_tracker_fails_the_others_go_on_and_one_line_says_so(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: dict[str, list[int]] = {"tensorboard": [], "trackio": []}

    def sound(*_: object) -> Tracker:
        return Tracker(lambda step, _: logged["tensorboard"].append(step))

    def failing(*_: object) -> Tracker:
        def log(step: int, _: dict) -> None:
            logged["trackio"].append(step)
            if step == 2:
                raise RuntimeError("no space\x1b[2J left\nand more")

        return Tracker(log)

    def closed(*_: object) -> Tracker:
        raise OSError("no network")

    table = {"tensorboard": sound, "trackio": failing, "wandb": closed}
    monkeypatch.setattr(trackers, "TRACKERS", table)
    said: list[str] = []
    opened = Trackers(said.append)
    names = ("wandb", "trackio", "tensorboard", "tensorboard")
    opened.begin(changed(config, run__trackers=names), tmp_path, 0)
    for step in (1, 2, 3):
        opened.tell("log", step, {"val/top1": 0.5})
    opened.tell("images", 3, {})
    opened.tell("close", True)
    assert logged == {"tensorboard": [1, 2, 3], "trackio": [1, 2]}
    end = "metrics.jsonl has all metrics"
    assert said == [
        f"wandb failed, training continues: no network; {end}",
        f"trackio failed, training continues: no space\\x1b[2J left; {end}",
    ]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_missing_library_is_refused_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda _: None)
    check_installed(["tensorboard"])
    with pytest.raises(UserError, match=f"pip install {name}$"):
        check_installed(["tensorboard", name])


@pytest.mark.parametrize(
    ("has_key", "mode", "note"),
    [
        (False, "", "kept offline; to upload: "),
        (True, "", "https"),
        (False, "on", "http"),
    ],
)
def test_wandb_is_offline_without_a_key_and_is_sent_nothing_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_key: bool, mode: str, note: str
) -> None:
    library = Library(has_key)
    monkeypatch.setenv("WANDB_MODE", mode)
    monkeypatch.setitem(sys.modules, "wandb", library)
    assert trackers.TRACKERS["wandb"](tmp_path, {"optim.lr": 0.1}, 0).note.startswith(note)
    assert library.options["mode"] == (None if has_key or mode else "offline")
    settings = library.options["settings"]
    assert settings["console"] == "off"
    assert not settings["x_save_requirements"]
    kinds = ("code", "git", "meta", "machine_info", "stats")
    off = {name.removeprefix("x_") for name, value in settings.items() if value is True}
    assert off >= {f"disable_{kind}" for kind in kinds}


def test_knobs_are_public_without_paths(config: Config) -> None:
    config = changed(config, data__root="/home/planted/images", run__init_from="planted.pt")
    knobs = public_knobs(config)
    assert "planted" not in str(knobs)
    assert (knobs["optim.lr"], knobs["compute.compile"], knobs["data.workers"]) == (
        0.02,
        False,
        "auto",
    )


def test_a_cell_of_a_confusion_matrix_is_the_darker_the_larger_its_share() -> None:
    image = confusion_image(torch.tensor([[9, 1, 0], [0, 0, 0], [0, 0, 5]]))
    assert (image.dtype, image.shape) == (np.uint8, (510, 510, 3))
    cells = image[::170, ::170, 0].tolist()
    assert cells == [[13, 174, 255], [255, 255, 255], [255, 255, 0]]
