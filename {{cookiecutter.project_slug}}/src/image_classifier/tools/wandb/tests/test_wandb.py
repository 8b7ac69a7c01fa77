"""Weights & Biases is sent nothing of the machine; the real library is tested by the template."""

import sys
from types import SimpleNamespace

import pytest

from image_classifier.tools.wandb.tracker import open_tracker


@pytest.mark.parametrize(
    ("has_key", "mode", "note"),
    [(False, "", "kept offline; to upload: "), (True, "", "https"), (False, "on", "http")],
)
def test_wandb_is_offline_without_a_key_and_is_sent_nothing_of_the_machine(
    tmp_path, monkeypatch, has_key, mode, note
):
    asked = {}

    def init(**options):
        asked.update(options)
        return SimpleNamespace(offline=options["mode"] == "offline", url="https://example.com/run")

    login = lambda prompt, verify: has_key and not prompt and not verify  # noqa: E731
    library = SimpleNamespace(init=init, login=login, Settings=dict)
    monkeypatch.setenv("WANDB_MODE", mode)
    monkeypatch.setitem(sys.modules, "wandb", library)
    assert open_tracker(tmp_path, {"optim.lr": 0.1}, 0).note.startswith(note)
    assert asked["mode"] == (None if has_key or mode else "offline")
    assert asked["settings"]["console"] == "off"
    assert not asked["settings"]["x_save_requirements"]
    off = {name.removeprefix("x_") for name, value in asked["settings"].items() if value is True}
    kinds = ("code", "git", "meta", "machine_info", "stats")
    assert off >= {f"disable_{kind}" for kind in kinds}
