"""Classic mistakes, each planted for real: an error comes before the first step."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import changed
from torch import nn

from image_classifier.cli import main
from image_classifier.config import Config
from image_classifier.data import shared_memory
from image_classifier.data.datasets import DATASETS
from image_classifier.data.datasets.shapes import shapes
from image_classifier.data.loader import (
    EvalData,
    Prefetcher,
    TrainData,
)
from image_classifier.data.samples import Samples
from image_classifier.data.shared_memory import SharedMemoryLoader
from image_classifier.errors import UserError
from image_classifier.models import build_model
from image_classifier.optim import build_schedule
from image_classifier.presets import PRESETS, smoke
from image_classifier.runtime.command_line import parse, take_preset
from image_classifier.runtime.distributed import World
from image_classifier.tracking import Setup, check_setup
from image_classifier.train import train

CPU = World(torch.device("cpu"))
Check = Callable[..., None]


@pytest.fixture(scope="module")
def check():
    """Check a run of smoke with other options or another model."""
    few = changed(smoke(), epochs=2, data__limit=64, data__batch_size=16)
    train_data, val_data = TrainData(few, CPU), EvalData(few.data, "val", CPU)

    def check(model=None, **changes):
        config = changed(few, **changes)
        model = model or build_model(config.model, 10, config.data.image_size)
        check_setup(Setup(config, CPU, train_data, val_data, model, None, 0))

    return check


def plant(monkeypatch, config, split, **changes):
    """`config` with a dataset of one's own, in which one split has something else."""

    def mine(data, wanted):
        source = shapes(data, wanted)
        return replace(source, **changes) if wanted == split else source

    monkeypatch.setitem(DATASETS, "mine", mine)
    return changed(config, data__name="mine")


@pytest.mark.parametrize("knob", ["augment__min_size", "data__test_size"])
def test_sizes_and_heads_that_do_not_fit_are_refused(check, knob):
    flat = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32**2, 10))
    check(model=flat)
    with pytest.raises(UserError, match=r"can.t take images of 24 pixels.*: .*mat1"):
        check(model=flat, **{knob: 24})
    check(**{knob: 24})  # convolutions take both
    with pytest.raises(UserError, match=r"gives .7,. values.* 10 classes"):
        check(model=build_model(smoke().model, 7, 32), **{knob: 24})


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_counts_in_epochs_of_the_run(preset):
    made = PRESETS[preset]()
    words = [preset, "--epochs=1"]
    config = parse(Config, words, prog="train", about="", default=take_preset(words, "shapes")[1])
    share = min(1, 1 / made.epochs)
    assert config.optim.warmup_epochs == pytest.approx(share * made.optim.warmup_epochs, abs=1e-6)
    assert config.optim.frozen_epochs == pytest.approx(share * made.optim.frozen_epochs, abs=1e-6)
    assert config.run.evaluate_every_epochs <= 1
    lr_at = build_schedule(config.optim, 100, 100)
    rates = [lr_at(step) for step in range(100)]
    peak = rates.index(max(rates))
    assert bool(peak) == bool(made.optim.warmup_epochs)
    assert rates == sorted(rates[:peak]) + sorted(rates[peak:], reverse=True)
    assert rates[-1] < rates[peak] / 20


def test_knobs_that_are_given_are_not_shrunk(capsys):
    words = ["--epochs", "2", "--optim.warmup-epochs=1.5", "--run.evaluate-every-epochs=0.5"]
    _, default = take_preset(words, "shapes")
    config = parse(Config, words, prog="train", about="", default=default)
    assert (config.epochs, config.optim.warmup_epochs) == (2, 1.5)
    assert config.run.evaluate_every_epochs == 0.5
    for epochs in ("many", "0", "-2", "nan", "inf", ""):
        assert take_preset(["folder", "--epochs", epochs], "shapes")[1] == PRESETS["folder"]()
    with pytest.raises(SystemExit):
        main(["train", "finetune", "--epochs", "2", "--help"])
    assert re.search(r"--optim.frozen-epochs[^()]*\(default:[\s│]+0.1\)", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("split", "changes", "said"),
    [
        ("train", {"labels": torch.arange(64)}, r"outside 0 \.\. 9.*is 10, of image 10"),
        ("val", {"labels": torch.full((64,), -100)}, r"outside 0 \.\. 9.*is -100, of image 0"),
        ("val", {"classes": tuple("jihgfedcba")}, "the classes of the validation images"),
    ],
)
def test_a_run_with_wrong_labels_is_refused_and_deletes_nothing(
    config, monkeypatch, split, changes, said
):
    rows = Path(config.run.dir, "metrics.jsonl")
    rows.parent.mkdir()
    rows.write_text("of an earlier run")
    mine = plant(monkeypatch, config, split, **changes)
    with pytest.raises(UserError, match=said):
        train(changed(mine, run__fresh=True))
    assert rows.read_text() == "of an earlier run"


def test_a_run_keeps_the_normalization_that_it_learned_with(config, monkeypatch):
    config = plant(monkeypatch, config, "train", mean=(0.4, 0.4, 0.4))
    train(config)
    plant(monkeypatch, config, "train", mean=(0.3, 0.3, 0.3))
    with pytest.raises(UserError, match=r"cannot continue .*normalized with a mean of"):
        train(config)


@pytest.mark.parametrize("refused", [False, True])
def test_memory_that_can_not_be_locked_is_noticed(config, monkeypatch, refused):
    asked, released, forgotten = [], [], []
    fake = SimpleNamespace(
        cudaHostRegister=lambda address, *_: asked.append(address) or int(refused),
        cudaHostUnregister=released.append,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(shared_memory, "forget_cuda_error", lambda: forgotten.append(True))
    samples = Samples(shapes(config.data, "train"), 32)
    batches = SharedMemoryLoader(samples, 4, workers=0, prefetch_batches=1, pin=True)
    batches.start()
    batches.close()
    assert asked == [batches.images.data_ptr(), batches.numbers.data_ptr()]
    assert released == ([] if refused else asked)
    assert forgotten == [True, True] * refused


@pytest.mark.parametrize("is_pinned", [False, True])
def test_batches_that_a_gpu_can_not_fetch_by_itself_are_said_once(monkeypatch, capsys, is_pinned):
    idle = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    idle.wait_stream = lambda _: None
    for name in ("Stream", "Event", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: idle)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *_, **__: tensor)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: is_pinned)
    world = World(torch.device("cuda"))
    for _ in range(2):
        host_batches = iter([(torch.tensor(step), torch.zeros(1)) for step in range(3)])
        assert [int(batch.pixels) for batch in Prefetcher(host_batches, world)] == [0, 1, 2]
    printed = capsys.readouterr().out
    assert printed.count("warning: batches are not page-locked") == (not is_pinned)
