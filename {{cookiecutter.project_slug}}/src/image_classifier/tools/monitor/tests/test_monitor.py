"""What `monitor` finds is in the log of a run, in one order."""

from types import SimpleNamespace

import pytest

from image_classifier.tools.monitor import observer
from image_classifier.tools.monitor.observer import open_observer
from image_classifier.tracking import Speed

SPEED = Speed(1, 32, 100.0, waited=0.0)


@pytest.mark.parametrize("mfu", [lambda _: 0.03125, None])  # None: no FLOPs were counted
def test_what_is_found_is_said_in_one_order(monkeypatch, mfu):
    gpus = SimpleNamespace(note="no GPU", read=lambda: {"energy_joules": 2.0})
    costs = "an image" if mfu else ""
    monkeypatch.setattr(observer.flops, "open_mfu", lambda _: (costs, mfu))
    monkeypatch.setattr(observer.gpu, "Gpus", lambda _: gpus)
    monkeypatch.setattr(observer.bottleneck, "open_judge", lambda *_: lambda _: "Slow.")
    monkeypatch.setattr(observer.sanity_checks, "find_mistakes", lambda _: ("unusual",))
    found = open_observer(SimpleNamespace(config=None, world=None, train_data=None))
    assert found.warnings == ("unusual",)
    assert found.notes == (("an image", "no GPU") if mfu else ("no GPU",))
    share = {"train/mfu": 0.0312} if mfu else {}
    assert [*found.metrics(SPEED).items()] == [*share.items(), ("energy_joules", 2.0)]
    assert found.metrics(None) == {"energy_joules": 2.0}
    assert found.verdict(SPEED) == ("Slow. MFU 3%." if mfu else "Slow.")
