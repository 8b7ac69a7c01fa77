"""Classic mistakes, each planted for real: it is refused or said before the first step."""

import io
import re
import shutil
from collections.abc import Iterator
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from html import escape
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import changed, run_ranks
from PIL import Image

from image_classifier.cli import main
from image_classifier.config import Config, DataConfig, UserError
from image_classifier.data import loader, shared_memory
from image_classifier.data.datasets import DATASETS
from image_classifier.data.datasets.shapes import shapes
from image_classifier.data.datasets.source import Source
from image_classifier.data.loader import (
    CopyAhead,
    EvalData,
    TrainData,
)
from image_classifier.data.samples import Samples
from image_classifier.data.shared_memory import SharedMemoryLoader
from image_classifier.evaluate import Scores, evaluate_run
from image_classifier.models import MODELS, build_model
from image_classifier.optim import build_schedule
from image_classifier.plan import Plan
from image_classifier.presets import PRESETS, smoke
from image_classifier.runtime.command_line import (
    parse,
    take_preset,
)
from image_classifier.runtime.distributed import World, join_world
from image_classifier.tracking.sanity_checks import (
    Start,
    find_mistakes,
    unusual_lr,
)
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


def start_of(config: Config, world: World = CPU) -> Start:
    """What a run of `config` would begin with."""
    train_data, val_data = TrainData(config, world), EvalData(config.data, "val", world)
    total_steps = train_data.steps_in(config.epochs)
    lr_at = build_schedule(config.optim, train_data.steps_per_epoch, total_steps)
    model = build_model(config.model, train_data.num_classes, config.data.image_size)
    return Start(config, model, train_data, val_data, lr_at, total_steps)


@pytest.fixture(scope="module")
def sound() -> Start:
    """A run without mistakes, for tests that do not change it."""
    return start_of(changed(smoke(), epochs=2, data__limit=64, data__batch_size=16))


@pytest.fixture
def start(config: Config) -> Start:
    """A run without mistakes, to plant some in."""
    return start_of(config)


def plant(monkeypatch: pytest.MonkeyPatch, config: Config, split: str, **changes: object) -> Config:
    """`config` with a dataset of one's own, in which one split has something else."""

    def mine(data: DataConfig, wanted: str) -> Source:
        source = shapes(data, wanted)
        return replace(source, **changes) if wanted == split else source

    monkeypatch.setitem(DATASETS, "mine", mine)
    return changed(config, data__name="mine")


def with_knobs_of(start: Start, config: Config) -> Start:
    """The same images and a BatchNorm, to be trained as `config` says."""
    total_steps = round(100 * config.epochs)
    lr_at = build_schedule(config.optim, 100, total_steps)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 10, 1), torch.nn.BatchNorm2d(10))
    return replace(start, config=config, model=model, lr_at=lr_at, total_steps=total_steps)


@pytest.mark.parametrize("knob", ["augment.min_size", "data.test_size"])
def test_sizes_that_a_model_cannot_take_are_refused(sound: Start, knob: str) -> None:
    config = changed(sound.config, **{knob.replace(".", "__"): 24})
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32**2, 10))
    with pytest.raises(UserError, match=f"--data.image-size 32, .* --{knob.replace('_', '-')} 24"):
        find_mistakes(replace(sound, config=config, model=model))
    find_mistakes(replace(sound, config=config))  # a network of convolutions takes both


@pytest.mark.parametrize("epochs", [None, 1, 2, 3, 5])
@pytest.mark.parametrize("preset", PRESETS)
def test_presets_have_no_mistakes_in_shorter_runs_either(
    sound: Start, preset: str, epochs: int | None
) -> None:
    made = PRESETS[preset]()
    words = [preset] if epochs is None else [preset, f"--epochs={epochs}"]
    _, default = take_preset(words, "shapes")
    config = parse(Config, words, prog="train", about="", default=default)
    start = with_knobs_of(sound, config)
    assert find_mistakes(start) == []
    share = min(1, config.epochs / made.epochs)
    assert config.optim.warmup_epochs == pytest.approx(share * made.optim.warmup_epochs, abs=1e-6)
    assert config.optim.frozen_epochs == pytest.approx(share * made.optim.frozen_epochs, abs=1e-6)
    rates = [start.lr_at(step) for step in range(start.total_steps)]
    peak = rates.index(max(rates))
    assert bool(peak) == bool(made.optim.warmup_epochs)
    assert rates == sorted(rates[:peak]) + sorted(rates[peak:], reverse=True)
    assert rates[-1] < rates[peak] / 20
    data = SimpleNamespace(
        steps_per_epoch=100,
        total_steps=start.total_steps,
        steps_in=lambda epochs: max(1, round(100 * epochs)),
    )
    plan = Plan(config.run, data)
    due = [step for step in range(1, data.total_steps + 1) if plan.evaluates_after(step)]
    assert due[-1] == data.total_steps
    assert len(due) <= config.epochs
    if preset in ("folder", "finetune"):
        assert len(due) == config.epochs


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
    sound: Start, name: str, lr: float, batch_size: int
) -> None:
    config = changed(smoke(), optim__name=name, optim__lr=lr, data__batch_size=batch_size)
    assert unusual_lr(replace(sound, config=config)) == ""


@pytest.mark.parametrize("factor", [100, 0.01, 0])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_learning_rate_that_is_far_off_is_said(sound: Start, preset: str, factor: float) -> None:
    config = PRESETS[preset]()
    if config.run.init_from and 0 < factor < 1:
        pytest.skip("trained weights may be moved slowly")
    config = changed(config, optim__lr=config.optim.lr * factor)
    (line,) = [
        line for line in find_mistakes(replace(sound, config=config)) if "--optim.lr" in line
    ]
    assert line.startswith(f"--optim.lr {config.optim.lr:g} is ")
    usual = float(line.split()[-1])
    assert unusual_lr(replace(sound, config=changed(config, optim__lr=usual))) == ""


def test_trained_weights_may_be_moved_slowly(sound: Start) -> None:
    slow = changed(sound.config, optim__lr=1e-5)
    assert unusual_lr(replace(sound, config=slow))
    assert not unusual_lr(replace(sound, config=changed(slow, run__init_from="best.pt")))


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("wrong", [10, -1, -100])
def test_labels_outside_the_classes_are_refused(
    config: Config, monkeypatch: pytest.MonkeyPatch, split: str, wrong: int
) -> None:
    labels = torch.arange(64) % 10
    labels[7] = wrong
    mine = plant(monkeypatch, config, split, labels=labels)
    with pytest.raises(UserError, match=rf"outside 0 \.\. 9.*is {wrong}, of image 7"):
        find_mistakes(start_of(mine))


def test_classes_that_differ_between_splits_are_refused(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    classes = shapes(config.data, "val").classes
    mine = plant(monkeypatch, config, "val", classes=(*classes[1:], classes[0]))
    with pytest.raises(UserError, match="classes of the validation images"):
        find_mistakes(start_of(mine))


def test_a_head_for_another_number_of_classes_is_refused(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    resnet9 = MODELS["resnet9"]
    monkeypatch.setitem(MODELS, "mine", lambda model, _, size: resnet9(model, 7, size))
    with pytest.raises(UserError, match=r"gives .7,. values.* 10 classes"):
        find_mistakes(start_of(changed(config, model__name="mine")))


def test_a_head_is_judged_by_what_it_gives(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(torch.nn.Module):
        """Its last layer was written down before the others."""

        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(4, 10)
            self.body = torch.nn.Conv2d(3, 4, 3)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(images).mean((2, 3)))

    monkeypatch.setitem(MODELS, "mine", lambda *_: Mine())
    assert find_mistakes(start_of(changed(config, model__name="mine"))) == []


def fault_of(model: torch.nn.Module, size: int) -> str:
    """What torch says to one image of `size` pixels in training."""
    try:
        model.train()(torch.zeros(1, 3, size, size))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "size"),
    [("resnet9", 8), ("resnet9", 16), ("airbench", 16), ("airbench", 17), ("resnet18", 8)],
)
def test_batchnorm_of_one_value_is_refused_where_torch_fails(
    config: Config, name: str, size: int
) -> None:
    config = changed(config, data__image_size=size, data__batch_size=1, data__limit=2)
    config = changed(config, model__name=name, model__norm="batch", model__width=8)
    start = start_of(changed(config, optim__lr=1e-4))
    error = fault_of(start.model, size)
    if error:
        assert "more than 1 value per channel" in error
        with pytest.raises(UserError, match=r"BatchNorm.*take a batch size of 2 or more"):
            find_mistakes(start)
    else:
        (line,) = find_mistakes(start)
        assert "BatchNorm takes its statistics from 1 of the 1 images" in line
    assert start.model.training


@pytest.mark.parametrize("world_size", [1, 2])
def test_parts_too_small_for_batchnorm_are_said(config: Config, world_size: int) -> None:
    world = replace(CPU, size=world_size)
    for accumulate, is_small in ((2 // world_size, False), (4 // world_size, True)):
        small = changed(config, model__norm="batch", optim__accumulate=accumulate)
        lines = [doubt for doubt in doubts_alone(small, world) if "BatchNorm" in doubt]
        assert bool(lines) == is_small
        assert not [d for d in doubts_alone(changed(small, model__norm="group"), world) if d]


def doubts_alone(config: Config, world: World) -> list[str]:
    """What is found on rank 0 of `world`, had it the others to ask."""
    start = start_of(config)
    start.train_data.world = world
    return find_mistakes(start)


def test_a_schedule_that_does_not_end_with_the_run_is_refused(sound: Start) -> None:
    steps_per_epoch = sound.train_data.steps_per_epoch
    for name in ("cosine", "triangle"):
        for factor in (0.75, 1.5, 10):
            config = changed(sound.config, optim__schedule=name)
            wrong = build_schedule(config.optim, steps_per_epoch, round(sound.total_steps * factor))
            with pytest.raises(UserError, match="does not end with the run: after 8 steps"):
                find_mistakes(replace(sound, config=config, lr_at=wrong))


def test_a_warmup_that_is_left_of_a_longer_run_is_said(sound: Start) -> None:
    (line,) = find_mistakes(replace(sound, config=changed(sound.config, epochs=1)))
    assert line.startswith("--optim.warmup-epochs 1 is 100% of the run")


def test_a_shuffled_or_padded_evaluation_is_refused(start: Start) -> None:
    data, right = start.val_data, start.val_data.indices
    for wrong, message in (
        (right.flip(0), "they are shuffled"),
        (right[:-3], "leaves out 3 and repeats 0"),
        (torch.cat((right[:-1], right[:1])), "leaves out 1 and repeats 1"),
    ):
        data.indices, data.labels = wrong, data.source.labels[wrong]
        with pytest.raises(UserError, match=message):
            find_mistakes(start)
    data.indices, data.labels = right, data.source.labels.roll(1)
    with pytest.raises(UserError, match="with their labels"):
        find_mistakes(start)


def found_on_rank(config: Config) -> tuple[list[str], str]:
    """What is found on this rank: before and after rank 1 has one more image, as padding gives."""
    with join_world(config.compute) as world:
        start = start_of(config, world)
        found, data = find_mistakes(start), start.val_data
        if world.rank:
            data.indices = torch.cat((torch.zeros(1, dtype=torch.int64), data.indices))
            data.labels = data.source.labels[data.indices]
        with pytest.raises(UserError) as refused:
            find_mistakes(start)
        return found, str(refused.value)


def test_every_rank_refuses_an_evaluation_that_counts_an_image_twice(config: Config) -> None:
    for found, refused in run_ranks(2, found_on_rank, changed(config, data__limit=33)):
        assert found == []
        assert "leaves out 0 and repeats 1" in refused


@pytest.fixture
def by_file(config: Config, photos: Path, tmp_path: Path) -> Config:
    """A run on a copy of the photographs."""
    root = shutil.copytree(photos, tmp_path / "photos")
    return changed(config, data__name="folder", data__root=str(root), data__batch_size=4)


@pytest.mark.parametrize(
    ("suffix", "top", "said"),
    [
        (".png", 4095, "15 of 255"),  # of a camera with 12 bits
        (".tif", 4095, "15 of 255"),
        (".png", 40, "40 of 255"),
        (".png", 255, ""),  # of 8 bits, saved as 16
        (".png", 65535, ""),
        (".jpg", 40, ""),  # has 8 bits, and may be dark
    ],
)
def test_deep_greys_that_become_black_are_said(
    by_file: Config, suffix: str, top: int, said: str
) -> None:
    root = Path(by_file.data.root)
    for path in root.glob("train/*/*.jpg"):
        grey = np.random.default_rng(0).integers(top // 2, top, (40, 40)).astype(np.uint16)
        grey[0, 0] = top
        kind = np.uint8 if suffix == ".jpg" else np.uint16
        path.unlink()
        Image.fromarray(grey.astype(kind)).save(path.with_suffix(suffix))
    lines = find_mistakes(start_of(by_file))
    assert len(lines) == bool(said)
    for line in lines:
        assert line.startswith("of 12 16-bit grey training images that were looked into, 12 become")
        assert f"{suffix}' is {top:,} of 65,535, which is {said}; scale" in line


@pytest.mark.parametrize(
    ("name", "stem", "size", "times"),
    [
        ("resnet18", "auto", 64, ("4", "16")),
        ("resnet18", "auto", 48, ("2.2", "16")),
        ("resnet18", "auto", 32, None),  # what it is made for
        ("resnet18", "auto", 224, None),
        ("resnet18", "small", 64, None),  # asked for
        ("resnet18", "imagenet", 64, None),
        ("mobilenet_v3_small", "auto", 64, None),  # no more than one of 128 pixels
        ("resnet9", "auto", 64, None),
    ],
)
def test_images_that_cost_more_than_larger_ones_are_said(
    sound: Start, name: str, stem: str, size: int, times: tuple[str, str] | None
) -> None:
    knobs = {"model__name": name, "model__stem": stem, "data__image_size": size}
    config = changed(sound.config, **knobs)
    with torch.device("meta"):
        model = build_model(config.model, 10, size)
    lines = find_mistakes(replace(sound, config=config, model=model))
    assert len(lines) == bool(times)
    for line in lines:
        assert f"about {times[0]} times as much as one of --data.image-size 128" in line
        assert f"{times[1]} times as much as with --model.stem imagenet" in line


@pytest.fixture(scope="module")
def mistaken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Scores, str]:
    """A run with two mistakes that are only said: its config, its end, and what it printed."""
    with pytest.MonkeyPatch.context() as monkeypatch, redirect_stdout(io.StringIO()) as printed:
        folder = str(tmp_path_factory.mktemp("mistaken"))
        config = changed(smoke(), epochs=1, data__limit=32, data__batch_size=16)
        config = changed(config, optim__lr=60.0, optim__momentum=0.0, optim__warmup_epochs=0.0)
        config = changed(config, run__dir=folder, run__trackers=())
        config = plant(monkeypatch, config, "val", mean=(0.3, 0.3, 0.3))
        scores = train(config)
    return config, scores, printed.getvalue()


def test_a_run_says_its_mistakes_and_goes_on(mistaken: tuple[Config, Scores, str]) -> None:
    config, _, printed = mistaken
    found = [line for line in printed.splitlines() if line.startswith("warning: ")]
    assert [any(words in line for line in found) for words in ("lr 60", "mean")] == [
        True,
        True,
    ]
    assert len(found) == 2
    page = Path(config.run.dir, "report.html").read_text()
    for line in found:
        assert f">{escape(line.removeprefix('warning: '))}</p>" in page


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
    with pytest.raises(UserError, match=r"cannot continue .*normalised by a mean of"):
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
    sound: Start, monkeypatch: pytest.MonkeyPatch, refused: bool
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
    monkeypatch.setattr(loader.resource, "getrlimit", lambda _: (65536, 65536))
    world = World(torch.device("cuda"))
    warnings = []
    for _ in range(2):
        batches = CopyAhead(iter([(torch.zeros(1), torch.zeros(1))] * 3), world, warnings)
        assert len(list(batches)) == 3
    printed = capsys.readouterr().out
    assert printed.count("warning: batches are not page-locked") == (not is_pinned)
    assert ("`ulimit -l`, now 64 KB" in printed) == (not is_pinned)
    assert [f"warning: {line}\n" for line in set(warnings)] == [printed] * (not is_pinned)
