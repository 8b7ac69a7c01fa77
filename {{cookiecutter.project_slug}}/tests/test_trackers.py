"""Trackers get what a run measures; they can't end it, and are told no secrets."""

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import changed

from image_classifier.config import Config, UserError
from image_classifier.tracking import trackers
from image_classifier.tracking.trackers import (
    Tracker,
    Trackers,
    check_installed,
    confusion_image,
    public_knobs,
)


class Library(ModuleType):
    """Stands in for wandb and for trackio: remembers what it was told."""

    TRACKIO_DIR = "somewhere"

    def __init__(self, name: str) -> None:
        """Under the name it is imported by."""
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        self.began: list[dict[str, Any]] = []
        self.logged: list[int] = []
        self.ended: list[int] = []
        self.has_key = False
        self.Image = np.asarray

    def Settings(self, **values: object) -> dict:  # noqa: N802 - as wandb has it
        """What was set."""
        return values

    def login(self, prompt: bool, verify: bool) -> bool:
        """Whether there is a key; never ask for one."""
        assert not prompt
        assert not verify
        return self.has_key

    def init(self, **options: Any) -> SimpleNamespace:  # noqa: ANN401
        """Begin a run."""
        self.began.append(options)
        return SimpleNamespace(
            log=lambda _, step: self.logged.append(step),
            finish=self.finish,
            offline=options.get("mode") == "offline",
            url="https://example.com/run",
        )

    def finish(self, exit_code: int = 0) -> None:
        """End it."""
        self.ended.append(exit_code)


def open_with(library: Library, folder: Path, start_step: int = 0) -> Tracker:
    """The tracker of that name, over a library that stands in."""
    return trackers.TRACKERS[library.__name__](folder, {"optim.lr": 0.1}, start_step)


@pytest.fixture
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Library:
    """A library that stands in, on a machine where nobody has set anything up for it."""
    for name in ("WANDB_MODE", "TRACKIO_DIR"):
        monkeypatch.setenv(name, "")  # so that what is set on the way is taken back
        monkeypatch.delenv(name)
    monkeypatch.setitem(sys.modules, request.param, Library(request.param))
    return sys.modules[request.param]


wandb = pytest.mark.parametrize("library", ["wandb"], indirect=True)
trackio = pytest.mark.parametrize("library", ["trackio"], indirect=True)


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


@wandb
def test_a_resumed_run_is_the_same_run_to_wandb(library: Library, tmp_path: Path) -> None:
    for step in (0, 7):
        tracker = open_with(library, tmp_path, start_step=step)
        tracker.log(step + 1, {"val/top1": 0.5})
        tracker.images(step + 1, {"confusion": np.zeros((2, 2, 3), np.uint8)})
        tracker.close(step == 7)
    first, second = library.began
    assert first["id"] == second["id"]
    assert first["resume"] == "allow"
    assert Path(first["dir"]) == tmp_path
    assert library.logged == [1, 1, 8, 8]
    assert library.ended == [1, 0]


@wandb
def test_without_a_key_wandb_stays_offline(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "wandb sync" in open_with(library, tmp_path).note
    assert library.began[-1]["mode"] == "offline"
    library.has_key = True
    assert open_with(library, tmp_path).note.startswith("https://")
    library.has_key = False
    monkeypatch.setenv("WANDB_MODE", "disabled")
    open_with(library, tmp_path)
    assert library.began[-1]["mode"] is None  # as its own variable says


@wandb
def test_wandb_is_sent_nothing_of_code_terminal_or_machine(
    library: Library, tmp_path: Path
) -> None:
    open_with(library, tmp_path)
    settings = library.began[0]["settings"]
    assert settings["console"] == "off"
    assert not settings["x_save_requirements"]
    kinds = ("code", "git", "meta", "machine_info", "stats")
    off = {name.removeprefix("x_") for name, value in settings.items() if value is True}
    assert off >= {f"disable_{kind}" for kind in kinds}


@trackio
def test_trackio_keeps_a_run_in_its_folder(library: Library, tmp_path: Path) -> None:
    note = open_with(library, tmp_path).note
    assert trackers.os.environ["TRACKIO_DIR"] == str(tmp_path / "trackio")
    assert "TRACKIO_DIR=somewhere trackio show" in note
    open_with(library, tmp_path, start_step=5).close(True)
    assert [began["resume"] for began in library.began] == ["never", "allow"]
    assert library.ended == [0]
    assert not library.began[0].get("space_id")


def test_knobs_are_public_without_paths_and_secrets(config: Config) -> None:
    config = changed(config, data__root="/home/planted/images", run__init_from="planted.pt")
    knobs = public_knobs(changed(config, model__name="https://user:planted@example.com/net"))
    assert "planted" not in str(knobs)
    assert knobs["model.name"] == "https://***@example.com/net"
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
