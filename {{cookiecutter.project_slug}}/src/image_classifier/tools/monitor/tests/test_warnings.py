"""Mistakes that a run can survive are warned of before the first step."""

import re
import shutil
from dataclasses import replace
from html import escape
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import changed, write_photo
from PIL import Image
from torch import nn
from torch.nn.functional import dropout

from image_classifier.config import OPTIMIZERS, DataConfig
from image_classifier.data.datasets import DATASETS, open_dataset
from image_classifier.data.datasets.shapes import shapes
from image_classifier.data.datasets.source import Source
from image_classifier.presets import PRESETS, shortened, smoke
from image_classifier.runtime.distributed import World
from image_classifier.tools.monitor import sanity_checks
from image_classifier.train import train


def test_every_check_is_made_and_knows_how_many_processes_share_a_batch(monkeypatch):
    own = [name for name in vars(sanity_checks) if is_check(name)]
    asked = {}
    for name in own:
        asked[name] = Mock(return_value=name)
        monkeypatch.setattr(sanity_checks, name, asked[name])
    assert {*sanity_checks.find_mistakes(Mock(world=World(torch.device("cpu"), size=3)))} == {*own}
    for name in ("small_batchnorm_batch", "idle_options"):
        assert asked[name].call_args.args[-1] == 3


def is_check(name):
    """Whether a function looks for a mistake: all of that module but the one that calls them."""
    one = getattr(sanity_checks, name)
    return getattr(one, "__module__", "") == sanity_checks.__name__ and name != "find_mistakes"


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_have_no_warnings_in_shorter_runs_either(preset):
    for config in (PRESETS[preset](), shortened(PRESETS[preset](), 1)):
        assert sanity_checks.unusual_lr(config) == ""
        assert sanity_checks.small_batchnorm_batch(config, nn.BatchNorm2d(3), processes=1) == ""
        assert sanity_checks.idle_options(config, processes=1) == ""


@pytest.mark.parametrize(
    ("name", "lr", "batch_size"),
    # Of VGG and ViT; and AdamW's, which Muon is scaled to.
    [("sgd", 0.01, 256), ("adamw", 3e-3, 4096), *[("muon", 1e-3, 1024)] * ("muon" in OPTIMIZERS)],
)
def test_a_learning_rate_that_is_far_from_published_ones_is_said(name, lr, batch_size):
    config = changed(smoke(), optim__name=name, optim__lr=lr, data__batch_size=batch_size)
    assert sanity_checks.unusual_lr(config) == ""
    for factor in (500, 0.002, 0):
        far = changed(config, optim__lr=factor * lr)
        warning = sanity_checks.unusual_lr(far)
        assert warning.startswith(f"--optim.lr {far.optim.lr:g} is ")
        usual = float(warning.split()[-1])
        assert sanity_checks.unusual_lr(changed(config, optim__lr=usual)) == ""
        # Pretrained weights may be moved slowly.
        assert bool(sanity_checks.unusual_lr(changed(far, run__init_from="x"))) == (factor != 0.002)


def test_without_momentum_the_usual_learning_rate_is_ten_times_as_large():
    config = changed(smoke(), optim__name="sgd", optim__lr=10.0, data__batch_size=256)
    assert "is 1e+02 times the usual" in sanity_checks.unusual_lr(config)
    assert sanity_checks.unusual_lr(changed(config, optim__momentum=0.0)) == ""


@pytest.mark.usefixtures("pages")
def test_a_run_says_its_mistakes_and_goes_on(config, monkeypatch, capsys):
    def mine(data, split):
        labels, is_test = torch.arange(64) // 60, split != "train"
        return replace(shapes(data, split), labels=labels, is_test=is_test)

    monkeypatch.setitem(DATASETS, "mine", mine)
    knobs = {"optim__lr": 60.0, "optim__momentum": 0.0, "optim__accumulate": 4}
    train(changed(config, epochs=1, data__name="mine", model__name="resnet9", **knobs))
    found = re.findall("^warning: (.*)", capsys.readouterr().out, re.MULTILINE)
    starts = (
        "--optim.lr 60 is",
        "BatchNorm takes its statistics from 4 of the 16 images",
        "the largest class has 60 training images and the smallest 4.",
        "the validation images are the test images",
    )
    assert [line[: len(start)] for line, start in zip(found, starts, strict=True)] == [*starts]
    page = Path(config.run.dir, "report.html")
    for line in found if page.exists() else ():  # `tools/report` may be deleted
        assert f">{escape(line)}</p>" in page.read_text()


def test_options_that_change_nothing_are_said(config):
    idle = sanity_checks.idle_options
    assert idle(config, 1) == ""
    for part, knob, value in (("run", "init_head", "zero"), ("compute", "parallel", "fsdp")):
        if hasattr(getattr(config, part), knob):
            chosen = changed(config, **{f"{part}__{knob}": value})
            flag = f"--{part}.{knob.replace('_', '-')}"
            assert idle(chosen, 1).startswith(f"{flag} {value} has no effect")
            assert idle(changed(chosen, run__init_from="x"), 2) == ""


def test_few_images_are_said_only_where_they_matter(config):
    few, halved = sanity_checks.small_batchnorm_batch, changed(config, optim__accumulate=2)
    assert "from 4 of the 16 images" in few(halved, nn.BatchNorm2d(3), processes=2)
    assert few(halved, nn.BatchNorm2d(3), processes=1) == ""
    assert few(halved, nn.GroupNorm(3, 3), processes=2) == ""
    frozen = changed(halved, optim__freeze_bn=True)
    assert "of random weights: leave it out" in few(frozen, nn.BatchNorm2d(3), processes=2)
    assert few(frozen, nn.GroupNorm(3, 3), processes=2) == ""
    assert few(changed(frozen, run__init_from="w.pt"), nn.BatchNorm2d(3), processes=2) == ""


def test_imbalance_is_said_for_one_label_and_for_several(config):
    rare, labels = sanity_checks.imbalanced_classes, torch.arange(64) // 60
    pixels = torch.zeros((64, 2, 2, 3), dtype=torch.uint8)
    for own, advice in ((labels, "sampling or loss"), (torch.eye(2).char()[labels], "loss")):
        source = Source(own, ("ant", "bee"), pixels)
        assert rare(config, source).startswith("the largest class has 60 training images and the")
        assert f"Try --data.balance {advice} (of the tool balance), with" in rare(config, source)
        if hasattr(config.data, "balance"):
            assert rare(changed(config, data__balance="loss"), source) == ""
        assert rare(config, source.picked(torch.arange(36, 64))) == ""
    no_cow = Source(torch.arange(64) % 2, ("ant", "bee", "cow"), pixels)
    assert rare(config, no_cow) == ""
    none = Source(torch.zeros(64, 2).char(), ("ant", "bee"), pixels)
    assert rare(config, none) == "no training image has a label"


def test_validation_images_of_another_split_are_said(on_photos, tmp_path):
    for number, split in enumerate(("train", "val", "test")):
        for name in ("ant/1.jpg", "bee/2.jpg"):
            write_photo(tmp_path / split / name, number)
    config = changed(on_photos, data__root=str(tmp_path))

    def said():
        train, val = (open_dataset(config.data, split) for split in ("train", "val"))
        return sanity_checks.reused_images(config, train, val)

    assert said() == ""  # the names are the same, the images are not
    (tmp_path / "val").rename(tmp_path / "own")
    for split, images in (("train", "training"), ("test", "test")):
        (tmp_path / "val").symlink_to(split)
        assert said().startswith(f"the validation images are the {images} images")
        (tmp_path / "val").unlink()
    several = changed(config, model__task="multi-label")
    (tmp_path / "own").rename(tmp_path / "val")
    shutil.rmtree(tmp_path / "test")
    shutil.copytree(tmp_path / "val", tmp_path / "test")
    splits = [open_dataset(config.data, n).fitted("multi-label", n) for n in ("train", "val")]
    assert "are the test images" in sanity_checks.reused_images(several, *splits)
    (tmp_path / "val").rename(tmp_path / "own")
    (tmp_path / "test" / "cow").mkdir()  # is no class, so nothing is known of the test images
    (tmp_path / "own").rename(tmp_path / "val")
    assert said() == ""
    held = shapes(changed(config, data__root=DataConfig.root).data, "val")  # its pixels
    assert "are the training images" in sanity_checks.reused_images(config, held, held)


def test_images_of_one_color_or_nearly_black_ones_are_said(on_photos, tmp_path):
    photos = open_dataset(on_photos.data, "train")
    assert sanity_checks.blank_images(photos) == ""
    labels, noise = torch.arange(20) % 2, torch.rand(20, 8, 8, 3)
    for pixels, said in (
        (noise * 255, ""),
        (torch.cat((torch.zeros(10, 8, 8, 3), noise[10:] * 255)), ""),  # of one class, say
        (noise * 16, "the training images are nearly black: of 8, the highest value is 15 of 255"),
        (noise * 4 + 250, "all of 8 training images that were looked at are of one color"),
        (torch.arange(20)[:, None, None, None].expand(20, 8, 8, 3) * 12, "all of 8 training"),
        (noise * 4, "all of 8 training"),
    ):
        source = Source(labels, ("ant", "bee"), pixels.byte().contiguous())
        assert sanity_checks.blank_images(source).startswith(said)
        assert bool(said) == bool(sanity_checks.blank_images(source))
    for number in range(20):
        path = tmp_path / ("ant", "bee")[number % 2] / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        gray = (noise[number, :, :, 0] * 4095).to(torch.int32).numpy().astype("uint16")
        Image.fromarray(gray).save(path)
    path.write_bytes(b"unreadable")  # which training names
    data = changed(on_photos.data, root=str(tmp_path))
    assert "--data.bits 16" in sanity_checks.blank_images(open_dataset(data, "train"))
    all_bits = open_dataset(changed(data, channels=1, bits=16), "train")
    assert sanity_checks.blank_images(all_bits) == ""


@pytest.mark.parametrize("is_random", [True, False])
def test_a_model_that_is_random_in_evaluation_is_said_and_stays_as_it_is(is_random):
    net = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(192), nn.Linear(192, 2))
    net[1].register_forward_hook(lambda part, _, out: dropout(out, 0.5, is_random or part.training))
    nn.init.zeros_(net[2].weight)  # which hides it
    before = [torch.get_rng_state(), *(value.clone() for value in net.state_dict().values())]
    assert bool(sanity_checks.random_evaluation(net, 8)) == is_random
    after = [torch.get_rng_state(), *net.state_dict().values()]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert net[1].training
    assert "--run.processes" in sanity_checks.data_parallel(nn.Sequential(nn.DataParallel(net)))
    assert sanity_checks.data_parallel(net) == ""
