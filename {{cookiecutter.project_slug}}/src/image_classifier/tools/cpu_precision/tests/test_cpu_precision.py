"""`--precision auto` on a CPU: the faster format for this network, the same ever after."""

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import DAMAGED, changed, run_ranks

from image_classifier.checkpoints.saving import read_newest
from image_classifier.data.loader import TrainData
from image_classifier.runtime.distributed import World, join_world
from image_classifier.settle import settle
from image_classifier.tools.cpu_precision import (
    precision as measuring,
)
from image_classifier.train import train

CPU = World(torch.device("cpu"))
FASTER = [(1.0, 0.5), (1.2, 0.6)]  # seconds in fp32 and in bf16
SLOWER = [(1.0, 1.1), (1.2, 1.3)]


@pytest.fixture
def auto(config, tmp_path, monkeypatch):
    """A tiny run that leaves the format to the machine, on which bf16 is faster."""
    monkeypatch.setattr(measuring, "measure", Mock(return_value=FASTER))
    return changed(config, precision="auto", data__cache=str(tmp_path / "cache"))


def chosen(config, world=CPU):
    """The format that a run takes, and why."""
    saved = read_newest(config.run, world)
    config, why = settle(config, TrainData(config, world), world, saved)
    return config.precision, why


def test_a_cpu_takes_bf16_only_where_it_was_measured_to_be_faster(auto):
    Path(auto.data.cache).mkdir()
    Path(auto.data.cache, "precision.json").write_bytes(DAMAGED["half"])
    measuring.measure.return_value = [(1.0, 0.5), (1.0, 2.0)]  # contradictory, so not remembered
    assert chosen(auto)[0] == chosen(auto)[0]
    assert measuring.measure.call_count == 2
    measuring.measure.return_value = FASTER
    for when in ("measured now", "measured before"):
        assert chosen(auto) == ("bf16", f"bf16 is 2 x as fast as fp32 here, {when}")
    assert measuring.measure.call_count == 3
    other = changed(auto, model__width=16)  # each network is measured
    measuring.measure.return_value = SLOWER
    assert chosen(other) == ("fp32", "bf16 is 0.91 x as fast as fp32 here, measured now")
    assert chosen(changed(other, precision="bf16"))[0] == "bf16"


def test_a_run_resumes_in_the_format_that_it_began_with(auto):
    train(changed(auto, epochs=1, optim__warmup_epochs=0))
    measuring.measure.return_value = SLOWER
    elsewhere = changed(auto, data__cache=auto.data.cache + "2")
    assert chosen(elsewhere) == ("bf16", "as this run began")
    assert chosen(changed(elsewhere, run__fresh=True))[0] == "fp32"


def test_the_measurement_leaves_the_random_state_as_it_was(config):
    before = torch.default_generator.get_state()
    rounds = measuring.measure(config, 10, 16, CPU)
    assert torch.equal(torch.default_generator.get_state(), before)
    assert min(map(min, rounds)) > 0


def chosen_on_rank(config):
    """The format that this rank takes, where the two measure the opposite."""
    with join_world(config.compute) as world:
        measuring.measure = lambda *_: (FASTER, SLOWER)[world.rank]
        return chosen(config, world)[0]


def test_all_ranks_take_the_same_format(auto):
    assert run_ranks(2, chosen_on_rank, auto) == ["bf16", "bf16"]
