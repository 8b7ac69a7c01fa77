"""What limits the speed of a run is said after each epoch."""

import re
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import changed

from image_classifier.config import Config
from image_classifier.data.datasets.source import Source
from image_classifier.runtime.distributed import World
from image_classifier.tools.bottleneck import observer
from image_classifier.tracking import Speed
from image_classifier.train import train

LOADING = "Loading is the limit: 100 images/s, while the model could take 200. Try "
MODEL = "The model is the limit: 100 images/s"
CPU, GPU = World(torch.device("cpu"), size=2), World(torch.device("mps"))
HOUR = {"total_steps": 11250, "batch_size": 32, "world": CPU}  # at 100 images/s
IDLE, DECODED = (SimpleNamespace(num_filled=count, busy_seconds=4.0) for count in (0, 300))


@pytest.mark.parametrize(
    ("waited", "recipe", "known", "said"),
    [
        (0.5, "", {"where": "device"}, f"{LOADING}less of --augment."),
        (0.5, "", {"workers": 1}, f"{LOADING}`prepare`, which stores the images smaller or "),
        (0.5, "raw", {"workers": 1}, f"{LOADING}--data.workers 2 (now 1)."),
        (0.5, "raw", {}, f"{LOADING}more CPU cores, or a smaller --data.image-size."),
        (0.05, "", {}, f"{MODEL}. Try a smaller --model.name or --data.image-size."),
        (0.05, "", {"world": GPU}, f"{MODEL}. Try --compute.compile."),
        (0.05, "", {"loader": DECODED}, f"{MODEL}, while loading could give 300. Try a smaller"),
    ],
)
def test_what_is_slow_is_named_with_the_option_to_try(monkeypatch, waited, recipe, known, said):
    monkeypatch.setattr(observer, "num_cores", lambda: 2)
    data = {"where": "stream", "workers": 2, "loader": IDLE} | HOUR | known
    data = SimpleNamespace(source=SimpleNamespace(paths=[], recipe=recipe), **data)
    speed = Speed(step=10, image_size=32, images_per_second=100.0, waited=waited)
    verdict = observer.open_observer(SimpleNamespace(config=Config(), train_data=data)).verdict
    found, _, advice = verdict(speed).partition(" Try ")
    assert f"{found} Try {advice}".startswith(said)
    assert verdict(speed) == found  # the advice comes once


def test_new_advice_is_given_when_something_else_limits_a_run():
    data = SimpleNamespace(where="device", **HOUR)
    verdict = observer.open_observer(SimpleNamespace(config=Config(), train_data=data)).verdict
    speeds = [Speed(1, 32, 100.0, waited=waited) for waited in (0.0, 0.5, 0.0, 0.5)]
    assert ["Try" in verdict(speed) for speed in speeds] == [True, True, False, False]


def test_no_other_start_is_advised_for_the_last_minutes_of_a_run():
    data = SimpleNamespace(where="device", **HOUR)
    verdict = observer.open_observer(SimpleNamespace(config=Config(), train_data=data)).verdict
    said = [verdict(Speed(step, 32, 100.0, waited=0.0)) for step in (9500, 9300)]
    assert ["Try" in line for line in said] == [False, True]


def test_waiting_for_slow_images_is_measured(config, monkeypatch, capsys):
    read = Source.read
    monkeypatch.setattr(Source, "read", lambda *which: time.sleep(0.008) or read(*which))
    train(changed(config, epochs=1, data__where="stream", data__workers=0, data__limit=48))
    rate = re.search(r"Loading is the limit: (\d+) images/s, while", capsys.readouterr().out)[1]
    assert 4 < int(rate) <= 125  # a machine that has other things to do is slower
