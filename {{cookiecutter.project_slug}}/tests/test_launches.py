"""A step takes few operations, each of which a GPU launches as a kernel or more."""

from contextlib import closing
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from conftest import changed, mixed
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from image_classifier.checkpoints.state import TrainState
from image_classifier.config import OPTIMIZERS
from image_classifier.data import TrainData
from image_classifier.optim import build_optimizer
from image_classifier.precision import Precision
from image_classifier.runtime.distributed import World
from image_classifier.train import Training

CPU = World(torch.device("cpu"))


class Operations(TorchDispatchMode):
    """Keeps the operations in a block, how each was called, and where; views launch nothing."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, operation, types, words=(), knobs=None):
        result = operation(*words, **(knobs or {}))
        if not operation.is_view:
            self.calls.append((operation, knobs or {}, getattr(result, "device", None)))
        return result


MOST = {name: {"sgd": 12, "adamw": 16}.get(name, 60) for name in OPTIMIZERS}


@pytest.mark.parametrize(("name", "most"), MOST.items())
def test_a_deep_network_is_updated_and_averaged_in_as_many_operations_as_a_flat_one(
    config, monkeypatch, name, most
):
    counts = []
    for depth in (4, 12):
        optim = replace(config.optim, name=name)
        precision = Precision("fp32", config.compute, optim, torch.device("cpu"))
        layers = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(depth)]
        model = nn.Sequential(*layers)
        optimizer = build_optimizer(optim, model)
        state = TrainState(model, optimizer, precision, ema=deepcopy(model), ema_decay=0.9)
        for _ in range(2):  # the first step allocates
            model(torch.randn(4, 8)).square().sum().backward()
            with Operations() as found, monkeypatch.context() as patch:
                precision.step(optimizer)
                if state.step:  # to find the weights of a deep network takes longer than that
                    patch.setattr(nn.Module, "parameters", None)
                state.advance()
        counts.append(len(found.calls))
    assert counts[0] == counts[1] <= most


# Options, and the most operations: of augmentation, and of a whole step of a small network.
STEPS = [
    ({"augment__crop": "none", "augment__flip": "none"}, 5, 110),
    ({"augment__crop": "pad", "augment__flip": "random"}, 25, 130),
    ({"augment__crop": "pad", "augment__flip": "alternating"}, 25, 130),
    ({"optim__ema_decay": 0.9, "optim__clip_norm": 1.0}, 25, 140),
]
STEPS += [
    (knobs, 45, 150) for knobs in (mixed(cutout=4), mixed(mixup=0.2), mixed(cutmix=0.5)) if knobs
]


@pytest.mark.parametrize(("knobs", "augmented", "whole"), STEPS)
def test_a_step_takes_few_operations(config, knobs, augmented, whole):
    config = changed(config, model__name="resnet9", data__where="device", **knobs)
    size = config.data.batch_size
    with closing(TrainData(config, CPU)) as data:
        training = Training(config, CPU, data, size)
        training.begin()
        for loaded in data.batches(0, 2):  # the first step allocates
            with Operations() as of_step:
                training.step(loaded, 0.1, size)
        with Operations() as of_augment:
            training.augment(loaded, 1)
    assert len(of_augment.calls) <= augmented
    assert len(of_step.calls) <= whole


def test_an_order_is_copied_while_the_host_goes_on_out_of_page_locked_memory_alone(config):
    with closing(TrainData(config, CPU)) as data:
        data.home = torch.device("meta")  # as an Apple GPU, for which no memory is page-locked
        with Operations() as found:
            data.indices_at(0)
    copies = [knobs for _, knobs, device in found.calls if device == data.home]
    assert [knobs.get("non_blocking", False) for knobs in copies] == [False]
