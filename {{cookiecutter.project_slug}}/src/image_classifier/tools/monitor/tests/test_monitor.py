"""The parts of `monitor` are one observer."""

from types import SimpleNamespace

from image_classifier.tools.monitor import observer
from image_classifier.tracking import Observer, Speed


def test_what_the_parts_say_is_said_in_their_order(monkeypatch):
    silent = Observer()
    first = Observer(("unusual",), ("an image",), lambda _: {"b": 1.0}, lambda _: "Slow.")
    second = Observer(("blank",), ("no GPU",), lambda _: {"a": 2.0}, lambda _: "MFU 3%.")
    parts = [SimpleNamespace(observe=lambda _, part=part: part) for part in (first, silent, second)]
    monkeypatch.setattr(observer, "PARTS", parts)
    found = observer.open_observer(SimpleNamespace())
    speed = Speed(1, 32, 100.0, waited=0.0)
    assert (found.warnings, found.notes) == (("unusual", "blank"), ("an image", "no GPU"))
    assert [*found.metrics(speed).items()] == [("b", 1.0), ("a", 2.0)]
    assert found.verdict(speed) == "Slow. MFU 3%."
