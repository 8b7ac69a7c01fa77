"""Weights of others start a run: files of torchvision, timm and this project; one download."""

import json
from dataclasses import replace

import pytest
import timm
import torch
from conftest import python
from image_classifier.cli import main
from image_classifier.config import DataConfig, ModelConfig
from image_classifier.data.datasets import open_dataset
from image_classifier.models import build_model
from image_classifier.presets import finetune, shapes
from image_classifier.train import train
from PIL import Image

PHOTOS = "--data.image-size 32 --data.batch-size 12 --data.workers 0 --run.trackers"
PHOTOS += " --compute.device cpu"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a run on many images, and photographs of three of their ten classes."""
    here = tmp_path_factory.mktemp("transfer")
    train(donor(here))
    for split, count in (("train", 8), ("val", 40)):
        source = open_dataset(DataConfig(limit=1000), split)
        for label in (2, 5, 7):
            folder = here / "photos" / split / source.classes[label]
            folder.mkdir(parents=True)
            for number in (source.labels == label).nonzero().flatten()[:count].tolist():
                Image.fromarray(source.pixels[number].numpy()).save(folder / f"{number}.png")
    return here


def donor(here):
    """A run on many images of ten classes."""
    base = shapes()
    return replace(
        base,
        epochs=2,
        precision="fp32",
        data=replace(base.data, limit=3000, batch_size=50),
        augment=replace(base.augment, crop="none"),
        model=replace(base.model, width=16),
        optim=replace(base.optim, name="muon", lr=0.01, warmup_epochs=0.3),
        run=replace(base.run, dir=str(here / "donor"), trackers=()),
    )


def test_trained_weights_help_where_images_are_few(place):
    base, preset = donor(place), finetune()
    weights, photos = place / "donor/checkpoints/best.safetensors", str(place / "photos")
    run = replace(base.run, init_from=str(weights), evaluate_every_epochs=15)
    tuned = replace(
        preset,
        epochs=15,
        precision="fp32",
        data=replace(preset.data, root=photos, image_size=32, batch_size=12, workers=0),
        augment=base.augment,
        model=base.model,
        optim=replace(preset.optim, lr=5e-3, frozen_epochs=3.0),
        run=replace(run, dir=str(place / "tuned")),
    )
    scratch = replace(
        tuned,
        optim=replace(tuned.optim, frozen_epochs=0.0, layer_decay=1.0),
        run=replace(run, dir=str(place / "scratch"), init_from=""),
    )
    assert train(tuned).top1 > train(scratch).top1 + 0.1


def test_a_frozen_start_is_the_same_on_two_processes(place):
    # BatchNorm would see other images on two processes.
    model = build_model(ModelConfig("resnet9_gn", width=8), 3, 32)
    torch.save(model.state_dict(), place / "group.pth")
    words = f"train finetune {PHOTOS} --data.root {place}/photos --run.init-from {place}/group.pth"
    words += " --augment.policy none --model.name resnet9_gn --model.width 8 --precision fp32"
    words += " --epochs 2 --optim.frozen-epochs 1 --optim.clip-norm 1 --run.log-every-steps 1"
    assert main([*words.split(), "--run.dir", f"{place}/on1"]) == 0
    two = [*words.split()[1:], "--run.dir", f"{place}/on2", "--run.processes", "2"]
    python("train.py", *two)
    losses = []
    for folder in ("on1", "on2"):
        text = (place / folder / "metrics.jsonl").read_text()
        rows = map(json.loads, text.splitlines())
        losses.append([row["train/loss"] for row in rows if "train/loss" in row])
    assert len(losses[0]) == 4  # two steps before the thaw, and two after it
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_model_of_timm_learns_from_its_own_weights(place, capsys):
    model = timm.create_model("test_vit", num_classes=7, img_size=32)
    path = place / "vit.pth"
    torch.save({"state_dict": model.state_dict()}, path)
    words = f"train finetune {PHOTOS} --data.root {place}/photos --model.name timm/test_vit"
    words += f" --run.init-from {path} --epochs 1 --run.dir {place}/vit"
    assert main(words.split()) == 0
    assert f"weights from '{path}'; head is new, for other classes" in capsys.readouterr().out
    assert main(["evaluate", f"{place}/vit", "--device", "cpu"]) == 0
    assert "120 val images" in capsys.readouterr().out


def test_the_suggested_learning_rate_is_within_a_decade_of_a_good_one(tmp_path, capsys):
    words = "find-lr shapes --model.width 16 --data.batch-size 128 --data.limit 4000"
    words += f" --compute.device cpu --precision fp32 --run.dir {tmp_path} --low 3e-3 --steps 140"
    assert main(words.split()) == 0
    suggested = float(capsys.readouterr().out.splitlines()[-1].split()[-1])
    assert 0.025 < suggested < 2.5  # 0.5 is the preset's, for batches of 250: 0.25 for 128
