"""`--precision auto`: what is fastest for this network on this machine, and the same ever after."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import changed, run_ranks

from image_classifier import evaluate as trained
from image_classifier import precision_probe
from image_classifier.config import Config
from image_classifier.data.loader import TrainData
from image_classifier.evaluate import load_model
from image_classifier.precision import Precision
from image_classifier.precision_probe import (
    Rounds,
    gain_of,
    measure,
    settle_precision,
)
from image_classifier.runtime.distributed import World, join_world
from image_classifier.runtime.machine import usual_precision
from image_classifier.train import train

CPU = World(torch.device("cpu"))
FASTER = [(1.0, 0.5), (1.2, 0.6)]  # seconds in fp32 and in bf16
SLOWER = [(1.0, 1.1), (1.2, 1.3)]
DOUBTFUL = [(1.0, 0.5), (1.0, 2.0)]


@pytest.fixture
def auto(config: Config, tmp_path: Path) -> Config:
    """A tiny run that leaves the format to the machine."""
    return changed(config, precision="auto", data__cache=str(tmp_path / "cache"))


def plant(patch: pytest.MonkeyPatch, rounds: Rounds) -> list[int]:
    """Let the measurement find `rounds`; a list that grows with each measurement."""
    calls: list[int] = []
    patch.setattr(precision_probe, "measure", lambda *_: calls.append(1) or rounds)
    return calls


def settled(config: Config) -> tuple[str, str]:
    """The format that a run takes, and why."""
    chosen, why = settle_precision(config, TrainData(config, CPU), CPU)
    return chosen.precision, why


def test_a_cpu_takes_bf16_only_where_it_was_measured_to_be_faster(
    auto: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = plant(monkeypatch, FASTER)
    for when in ("measured now", "measured before"):
        assert settled(auto) == ("bf16", f"bf16 is 2 x as fast as fp32 here, {when}")
    assert len(calls) == 1
    other = changed(auto, model__width=16)  # another network is another question
    plant(monkeypatch, SLOWER)
    assert settled(other) == ("fp32", "bf16 is 0.91 x as fast as fp32 here, measured now")
    assert settled(changed(other, precision="bf16"))[0] == "bf16"


def test_a_measurement_that_contradicts_itself_is_not_remembered(
    auto: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = plant(monkeypatch, DOUBTFUL)
    assert settled(auto)[0] == settled(auto)[0]
    assert len(calls) == 2


def test_a_run_goes_on_in_the_format_that_it_began_with(
    auto: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(monkeypatch, FASTER)
    train(changed(auto, epochs=1, optim__warmup_epochs=0))
    assert "bf16; bf16 is 2 x as fast as fp32 here" in capsys.readouterr().out
    plant(monkeypatch, SLOWER)
    elsewhere = changed(auto, data__cache=auto.data.cache + "2")
    assert settled(elsewhere) == ("bf16", "as this run began")
    assert settled(changed(elsewhere, run__fresh=True))[0] == "fp32"
    for usual in ("bf16", "fp32"):  # a CPU with bf16, and one without
        monkeypatch.setattr(trained, "usual_precision", lambda _, usual=usual: usual)
        assert load_model(auto.run.dir, auto.compute, CPU).precision.name == usual


def test_the_measurement_leaves_the_random_state_as_it_was(auto: Config) -> None:
    before = torch.default_generator.get_state()
    rounds = measure(auto, 10, 16, CPU)
    assert torch.equal(torch.default_generator.get_state(), before)
    assert 1 <= len(rounds) <= precision_probe.MOST_ROUNDS
    assert min(map(min, rounds)) > 0


@pytest.mark.parametrize(
    ("fp32", "bf16", "steps"),
    [  # seconds of a step by its images; how many of each format are made
        pytest.param(lambda n: 0.04 * n, lambda n: 0.05 + 0.02 * n, 6, id="doubtful with few"),
        pytest.param(lambda n: 0.04 * n, lambda n: 0.09 * n, 3, id="slower with any"),
        pytest.param(lambda n: 0.01 * n, lambda n: 0.02 * n, 6, id="as many as take a while"),
        pytest.param(lambda n: 0.3 * n, lambda n: 0.2 * n, 1, id="long"),
    ],
)
def test_no_more_steps_are_measured_than_tell_the_faster_format(
    auto: Config,
    monkeypatch: pytest.MonkeyPatch,
    fp32: Callable[[int], float],
    bf16: Callable[[int], float],
    steps: int,
) -> None:
    made: list[int] = []

    def seconds(precision: Precision, _: torch.nn.Module, count: int, __: int) -> float:
        made.append(count)
        return {"fp32": fp32, "bf16": bf16}[precision.name](count)

    monkeypatch.setattr(precision_probe, "step_seconds", seconds)
    assert (gain_of(measure(auto, 10, 64, CPU)) > 1) == (fp32(64) > bf16(64))
    assert len(made) == 2 * steps, made


def settled_on_rank(config: Config) -> str:
    """The format that this rank takes, where the two measure the opposite."""
    with join_world(config.compute) as world, pytest.MonkeyPatch.context() as patch:
        plant(patch, (FASTER, SLOWER)[world.rank])
        return settle_precision(config, TrainData(config, world), world)[0].precision


def test_all_ranks_take_the_same_format(auto: Config) -> None:
    assert run_ranks(2, settled_on_rank, auto) == ["bf16", "bf16"]


@pytest.mark.parametrize(
    ("capability", "name"),
    [((9, 0), "bf16"), ((8, 0), "bf16"), ((7, 5), "fp16"), ((7, 0), "fp16"), ((6, 1), "fp32")],
)
def test_a_gpu_takes_what_its_generation_is_made_for(
    capability: tuple[int, int], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert usual_precision(torch.device("cuda", 0)) == name
