"""Classic mistakes, each planted for real: an error or a warning comes before the first step."""

import io
import re
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from html import escape
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import changed
from torch import nn

from image_classifier.cli import main
from image_classifier.config import Config, DataConfig
from image_classifier.data import shared_memory
from image_classifier.data.datasets import DATASETS
from image_classifier.data.datasets.shapes import shapes
from image_classifier.data.datasets.source import Source
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
from image_classifier.runtime.command_line import (
    parse,
    take_preset,
)
from image_classifier.runtime.distributed import World
from image_classifier.tracking import check_setup
from image_classifier.tracking.sanity_checks import unusual_lr
from image_classifier.train import train

CPU = World(torch.device("cpu"))
PUBLISHED = [  # optimizer, learning rate, global batch: torchvision's recipes, and a few others
    ("sgd", 0.1, 256),  # ResNet, https://arxiv.org/abs/1512.03385
    ("sgd", 0.8, 1024),  # RegNet
    ("sgd", 0.01, 256),  # VGG, AlexNet
    ("sgd", 0.4, 512),  # https://myrtle.ai/learn/how-to-train-your-resnet/
    ("adamw", 3e-3, 4096),  # ViT
    ("adamw", 5e-4, 512),  # DeiT
    ("muon", 1e-3, 1024),  # AdamW's, which it is scaled to
]
Check = Callable[..., list[str]]


@pytest.fixture(scope="module")
def check() -> Check:
    """The warnings for a run of smoke with other options, another model or number of processes."""
    few = changed(smoke(), epochs=2, data__limit=64, data__batch_size=16)
    train_data, val_data = TrainData(few, CPU), EvalData(few.data, "val", CPU)

    def check(
        config: Config | None = None,
        model: nn.Module | None = None,
        processes: int = 1,
        **changes: object,
    ) -> list[str]:
        config = changed(config or few, **changes)
        train_data.world = replace(CPU, size=processes)
        model = model or build_model(config.model, 10, config.data.image_size)
        return check_setup(config, model, train_data, val_data)

    return check


def plant(monkeypatch: pytest.MonkeyPatch, config: Config, split: str, **changes: object) -> Config:
    """`config` with a dataset of one's own, in which one split has something else."""

    def mine(data: DataConfig, wanted: str) -> Source:
        source = shapes(data, wanted)
        return replace(source, **changes) if wanted == split else source

    monkeypatch.setitem(DATASETS, "mine", mine)
    return changed(config, data__name="mine")


@pytest.mark.parametrize("knob", ["augment__min_size", "data__test_size"])
def test_sizes_and_heads_that_do_not_fit_are_refused(check: Check, knob: str) -> None:
    flat = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32**2, 10))
    assert check(model=flat) == []
    with pytest.raises(UserError, match=r"can.t take images of 24 pixels.*: .*mat1"):
        check(model=flat, **{knob: 24})
    assert check(**{knob: 24}) == []  # convolutions take both
    with pytest.raises(UserError, match=r"gives .7,. values.* 10 classes"):
        check(model=build_model(smoke().model, 7, 32), **{knob: 24})


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_have_no_warnings_in_shorter_runs_either(check: Check, preset: str) -> None:
    made = PRESETS[preset]()
    words = [preset, "--epochs=1"]
    config = parse(Config, words, prog="train", about="", default=take_preset(words, "shapes")[1])
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = nn.Sequential(nn.Conv2d(3, 10, 1), nn.BatchNorm2d(10), pool)
    assert check(config, model) == []
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


def test_knobs_that_are_given_are_not_shrunk(capsys: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.parametrize(("name", "lr", "batch_size"), PUBLISHED)
def test_a_learning_rate_that_is_far_from_published_ones_is_said(
    name: str, lr: float, batch_size: int
) -> None:
    config = changed(smoke(), optim__name=name, optim__lr=lr, data__batch_size=batch_size)
    assert unusual_lr(config) == ""
    for factor in (500, 0.002, 0):
        far = changed(config, optim__lr=factor * lr)
        warning = unusual_lr(far)
        assert warning.startswith(f"--optim.lr {far.optim.lr:g} is ")
        assert unusual_lr(changed(config, optim__lr=float(warning.split()[-1]))) == ""
        # Pretrained weights may be moved slowly.
        assert bool(unusual_lr(changed(far, run__init_from="x"))) == (factor != 0.002)


@pytest.mark.parametrize(
    ("split", "changes", "said"),
    [
        ("train", {"labels": torch.arange(64)}, r"outside 0 \.\. 9.*is 10, of image 10"),
        ("val", {"labels": torch.full((64,), -100)}, r"outside 0 \.\. 9.*is -100, of image 0"),
        ("val", {"classes": tuple("jihgfedcba")}, "the classes of the validation images"),
    ],
)
def test_a_run_with_wrong_labels_is_refused_and_deletes_nothing(
    config: Config, monkeypatch: pytest.MonkeyPatch, split: str, changes: dict, said: str
) -> None:
    rows = Path(config.run.dir, "metrics.jsonl")
    rows.parent.mkdir()
    rows.write_text("of an earlier run")
    mine = plant(monkeypatch, config, split, **changes)
    with pytest.raises(UserError, match=said):
        train(changed(mine, run__fresh=True))
    assert rows.read_text() == "of an earlier run"


def test_micro_batches_too_small_for_batchnorm_are_said(check: Check) -> None:
    few = {"optim__accumulate": 2, "processes": 2}
    (line,) = check(model__name="resnet9", **few)
    assert "BatchNorm takes its statistics from 4 of the 16 images" in line
    assert check(model__name="resnet9", optim__accumulate=2) == []
    assert check(model__name="resnet9_gn", **few) == []


@pytest.fixture(scope="module")
def mistaken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, str]:
    """A run with two mistakes that are only said: its config, and what it printed."""
    with pytest.MonkeyPatch.context() as monkeypatch, redirect_stdout(io.StringIO()) as printed:
        folder = str(tmp_path_factory.mktemp("mistaken"))
        config = changed(smoke(), epochs=1, data__limit=32, data__batch_size=16)
        config = changed(config, optim__lr=60.0, optim__momentum=0.0, optim__warmup_epochs=0.0)
        config = changed(config, run__dir=folder, run__trackers=())
        pixels = shapes(config.data, "train").pixels
        config = plant(monkeypatch, config, "val", pixels=pixels, mean=(0.3, 0.3, 0.3))
        train(config)
    return config, printed.getvalue()


def test_a_run_says_its_mistakes_and_goes_on(mistaken: tuple[Config, str]) -> None:
    config, printed = mistaken
    found = [line for line in printed.splitlines() if line.startswith("warning: ")]
    assert ["lr 60" in found[0], "mean" in found[1], len(found)] == [True, True, 2]
    page = Path(config.run.dir, "report.html")
    for line in found if page.exists() else ():  # `tools/report` may be deleted
        assert f">{escape(line.removeprefix('warning: '))}</p>" in page.read_text()


def test_a_run_keeps_the_normalization_that_it_learned_with(
    mistaken: tuple[Config, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, _ = mistaken
    plant(monkeypatch, config, "train", mean=(0.3, 0.3, 0.3))
    with pytest.raises(UserError, match=r"cannot continue .*normalized with a mean of"):
        train(config)


@pytest.mark.parametrize("refused", [False, True])
def test_memory_that_can_not_be_locked_is_noticed(
    config: Config, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
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
def test_batches_that_a_gpu_can_not_fetch_by_itself_are_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_pinned: bool
) -> None:
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
