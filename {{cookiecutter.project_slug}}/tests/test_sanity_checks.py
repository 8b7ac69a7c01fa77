"""Classic mistakes, each planted for real: an error or a warning comes before the first step."""

import io
import re
from collections.abc import Iterator
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from html import escape
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import changed

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
from image_classifier.evaluate import Scores, evaluate_run
from image_classifier.models import build_model
from image_classifier.optim import build_schedule
from image_classifier.presets import PRESETS, smoke
from image_classifier.runtime.command_line import (
    parse,
    take_preset,
)
from image_classifier.runtime.distributed import World
from image_classifier.tracking import RunSetup, check_setup
from image_classifier.tracking.sanity_checks import unusual_lr
from image_classifier.train import train

CPU = World(torch.device("cpu"))
PUBLISHED = [  # optimizer, learning rate, global batch: torchvision's recipes, and a few others
    ("sgd", 0.1, 256),  # ResNet, https://arxiv.org/abs/1512.03385
    ("sgd", 0.5, 1024),  # ResNet-50 of 2021, EfficientNetV2
    ("sgd", 0.8, 1024),  # RegNet
    ("sgd", 0.01, 256),  # VGG, AlexNet
    ("sgd", 0.045, 256),  # MobileNetV2
    ("sgd", 0.4, 512),  # https://myrtle.ai/learn/how-to-train-your-resnet/
    ("adamw", 3e-3, 4096),  # ViT
    ("adamw", 1e-3, 1024),  # ConvNeXt, Swin
    ("adamw", 5e-4, 512),  # DeiT
    ("muon", 1e-3, 1024),  # AdamW's, which it is scaled to
]


@pytest.fixture(autouse=True, scope="module")
def few_threads() -> Iterator[None]:
    """What is computed here is so little that threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def setup_of(config: Config) -> RunSetup:
    """What a run of `config` would begin with."""
    train_data, val_data = TrainData(config, CPU), EvalData(config.data, "val", CPU)
    model = build_model(config.model, train_data.num_classes, config.data.image_size)
    return RunSetup(config, model, train_data, val_data)


@pytest.fixture(scope="module")
def sound() -> RunSetup:
    """A run without mistakes, for tests that do not change it."""
    return setup_of(changed(smoke(), epochs=2, data__limit=64, data__batch_size=16))


def plant(monkeypatch: pytest.MonkeyPatch, config: Config, split: str, **changes: object) -> Config:
    """`config` with a dataset of one's own, in which one split has something else."""

    def mine(data: DataConfig, wanted: str) -> Source:
        source = shapes(data, wanted)
        return replace(source, **changes) if wanted == split else source

    monkeypatch.setitem(DATASETS, "mine", mine)
    return changed(config, data__name="mine")


@pytest.mark.parametrize("knob", ["augment.min_size", "data.test_size"])
def test_sizes_that_a_model_cannot_take_are_refused(sound: RunSetup, knob: str) -> None:
    config = changed(sound.config, **{knob.replace(".", "__"): 24})
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32**2, 10))
    with pytest.raises(UserError, match=f"--data.image-size 32, .* --{knob.replace('_', '-')} 24"):
        check_setup(replace(sound, config=config, model=model))
    assert check_setup(replace(sound, config=config)) == []  # convolutions take both


@pytest.mark.parametrize("epochs", [None, 1, 3])
@pytest.mark.parametrize("preset", PRESETS)
def test_presets_have_no_warnings_in_shorter_runs_either(
    sound: RunSetup, preset: str, epochs: int | None
) -> None:
    made = PRESETS[preset]()
    words = [preset] if epochs is None else [preset, f"--epochs={epochs}"]
    config = parse(Config, words, prog="train", about="", default=take_preset(words, "shapes")[1])
    pool = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 10, 1), torch.nn.BatchNorm2d(10), pool)
    assert check_setup(replace(sound, config=config, model=model)) == []
    share = min(1, config.epochs / made.epochs)
    assert config.optim.warmup_epochs == pytest.approx(share * made.optim.warmup_epochs, abs=1e-6)
    assert config.optim.frozen_epochs == pytest.approx(share * made.optim.frozen_epochs, abs=1e-6)
    assert config.run.evaluate_every_epochs <= max(1, config.epochs)
    total_steps = round(100 * config.epochs)
    lr_at = build_schedule(config.optim, 100, total_steps)
    rates = [lr_at(step) for step in range(total_steps)]
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
def test_published_learning_rates_are_usual(
    sound: RunSetup, name: str, lr: float, batch_size: int
) -> None:
    config = changed(smoke(), optim__name=name, optim__lr=lr, data__batch_size=batch_size)
    assert unusual_lr(replace(sound, config=config)) == ""


@pytest.mark.parametrize("factor", [100, 0.01, 0])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_learning_rate_that_is_far_off_is_said(
    sound: RunSetup, preset: str, factor: float
) -> None:
    config = PRESETS[preset]()
    config = changed(config, optim__lr=config.optim.lr * factor)
    warning = unusual_lr(replace(sound, config=config))
    if config.run.init_from and 0 < factor < 1:  # pretrained weights may be moved slowly
        assert warning == ""
        return
    assert warning.startswith(f"--optim.lr {config.optim.lr:g} is ")
    usual = float(warning.split()[-1])
    assert unusual_lr(replace(sound, config=changed(config, optim__lr=usual))) == ""


def wrong_label(label: int) -> torch.Tensor:
    """64 labels of 10 classes, of which the eighth is `label`."""
    labels = torch.arange(64) % 10
    labels[7] = label
    return labels


@pytest.mark.parametrize(
    ("split", "changes", "said"),
    [
        ("train", {"labels": wrong_label(10)}, r"outside 0 \.\. 9.*is 10, of image 7"),
        ("val", {"labels": wrong_label(-100)}, r"outside 0 \.\. 9.*is -100, of image 7"),
        ("val", {"classes": tuple("jihgfedcba")}, "the classes of the validation images"),
    ],
)
def test_labels_that_are_no_number_of_a_class_are_refused(
    config: Config, monkeypatch: pytest.MonkeyPatch, split: str, changes: dict, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        check_setup(setup_of(plant(monkeypatch, config, split, **changes)))


def test_a_head_for_another_number_of_classes_is_refused(sound: RunSetup) -> None:
    model = build_model(sound.config.model, 7, 32)
    with pytest.raises(UserError, match=r"gives .7,. values.* 10 classes"):
        check_setup(replace(sound, model=model))


@pytest.mark.parametrize(
    ("name", "size", "is_refused"),
    [("resnet9", 8, True), ("resnet9", 16, False), ("airbench", 16, True), ("resnet18", 8, True)],
)
def test_batchnorm_of_one_value_is_refused_where_torch_fails(
    config: Config, name: str, size: int, is_refused: bool
) -> None:
    config = changed(config, data__image_size=size, data__batch_size=1, data__limit=2)
    config = changed(config, model__name=name, model__width=8)
    setup = setup_of(changed(config, optim__lr=1e-4))
    before = {name: tensor.clone() for name, tensor in setup.model.state_dict().items()}
    if is_refused:
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            setup.model(torch.zeros(1, 3, size, size))
        setup.model.load_state_dict(before)
        with pytest.raises(UserError, match=r"BatchNorm.*take a batch size of 2 or more"):
            check_setup(setup)
    else:
        (line,) = check_setup(setup)
        assert "BatchNorm takes its statistics from 1 of the 1 images" in line
    assert setup.model.training
    assert all(torch.equal(t, before[name]) for name, t in setup.model.state_dict().items())


@pytest.mark.parametrize("world_size", [1, 2])
def test_micro_batches_too_small_for_batchnorm_are_said(config: Config, world_size: int) -> None:
    for accumulate, name, count in (
        (2 // world_size, "resnet9", 0),
        (4 // world_size, "resnet9", 1),
        (4 // world_size, "resnet9_gn", 0),
    ):
        setup = setup_of(changed(config, model__name=name, optim__accumulate=accumulate))
        setup.train_data.world = replace(CPU, size=world_size)
        assert sum("BatchNorm" in line for line in check_setup(setup)) == count


def test_a_warmup_that_is_left_of_a_longer_run_is_said(sound: RunSetup) -> None:
    (line,) = check_setup(replace(sound, config=changed(sound.config, epochs=1)))
    assert line.startswith("--optim.warmup-epochs 1 is 100% of the run")


@pytest.mark.parametrize(
    ("name", "stem", "size", "times"),
    [
        ("resnet18", "auto", 64, "4"),
        ("resnet18", "auto", 48, "2.2"),
        ("resnet18", "auto", 32, ""),  # what it is made for
        ("resnet18", "auto", 224, ""),
        ("resnet18", "small", 64, ""),  # asked for
        ("mobilenet_v3_small", "auto", 64, ""),  # no more than one of 128 pixels
    ],
)
def test_images_that_cost_more_than_larger_ones_are_said(
    sound: RunSetup, name: str, stem: str, size: int, times: str
) -> None:
    knobs = {"model__name": name, "model__stem": stem, "data__image_size": size}
    config = changed(sound.config, **knobs)
    with torch.device("meta"):
        model = build_model(config.model, 10, size)
    lines = check_setup(replace(sound, config=config, model=model))
    assert len(lines) == bool(times)
    for line in lines:
        assert "16 times as much as with --model.stem imagenet" in line
        assert f"about {times} times as much as one of 128 pixels" in line


@pytest.fixture(scope="module")
def mistaken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Scores, str]:
    """A run with two mistakes that are only said: its config, its end, and what it printed."""
    with pytest.MonkeyPatch.context() as monkeypatch, redirect_stdout(io.StringIO()) as printed:
        folder = str(tmp_path_factory.mktemp("mistaken"))
        config = changed(smoke(), epochs=1, data__limit=32, data__batch_size=16)
        config = changed(config, optim__lr=60.0, optim__momentum=0.0, optim__warmup_epochs=0.0)
        config = changed(config, run__dir=folder, run__trackers=())
        pixels = shapes(config.data, "train").pixels
        config = plant(monkeypatch, config, "val", pixels=pixels, mean=(0.3, 0.3, 0.3))
        scores = train(config)
    return config, scores, printed.getvalue()


def test_a_run_says_its_mistakes_and_goes_on(mistaken: tuple[Config, Scores, str]) -> None:
    config, _, printed = mistaken
    found = [line for line in printed.splitlines() if line.startswith("warning: ")]
    assert ["lr 60" in found[0], "mean" in found[1]] == [True, True]
    assert len(found) == 2
    page = Path(config.run.dir, "report.html")
    for line in found if page.exists() else ():  # `tools/report` may be deleted
        assert f">{escape(line.removeprefix('warning: '))}</p>" in page.read_text()


def test_a_run_is_evaluated_with_the_normalisation_that_it_learned_with(
    mistaken: tuple[Config, Scores, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, scores, _ = mistaken
    pixels = shapes(config.data, "train").pixels
    plant(monkeypatch, config, "val", pixels=pixels, mean=(0.3, 0.3, 0.3))
    again = evaluate_run(config.run.dir, "val", "", config.compute)
    assert again.loss == pytest.approx(scores.loss, rel=1e-5)


def test_a_run_does_not_go_on_with_another_normalisation(
    mistaken: tuple[Config, Scores, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, _, _ = mistaken
    plant(monkeypatch, config, "train", mean=(0.3, 0.3, 0.3))
    with pytest.raises(UserError, match=r"cannot continue .*normalised with a mean of"):
        train(config)


def test_a_refused_run_deletes_nothing(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Path(config.run.dir, "metrics.jsonl")
    rows.parent.mkdir()
    rows.write_text("of an earlier run")
    mine = plant(monkeypatch, config, "train", labels=torch.arange(64))
    with pytest.raises(UserError, match=r"outside 0 \.\. 9"):
        train(changed(mine, run__fresh=True))
    odd = changed(config, data__batch_size=15, augment__mixup=0.2)
    with pytest.raises(UserError, match="an even number of images"):
        train(changed(odd, run__fresh=True))
    assert rows.read_text() == "of an earlier run"


@pytest.mark.parametrize("refused", [False, True])
def test_memory_that_can_not_be_locked_is_noticed(
    sound: RunSetup, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    asked, released, forgotten = [], [], []
    fake = SimpleNamespace(
        cudaHostRegister=lambda address, *_: asked.append(address) or int(refused),
        cudaHostUnregister=released.append,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(shared_memory, "forget_cuda_error", lambda: forgotten.append(True))
    samples = Samples(sound.train_data.source, sound.config.data)
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
