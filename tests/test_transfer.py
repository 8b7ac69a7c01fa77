"""Weights of others start a run: files of torchvision, timm and this project; recipes train."""

import pytest
import timm
import torch
from conftest import logged, losses, python
from image_classifier.cli import main
from image_classifier.config import DataConfig, ModelConfig
from image_classifier.data.datasets import open_dataset
from image_classifier.models import build_model
from PIL import Image

ON_CPU = "--run.trackers --compute.device cpu --precision fp32"
SHAPES = (
    f"{ON_CPU} --augment.crop none --augment.policy none --model.name airbench --model.width 16"
)
PHOTOS = f"finetune {ON_CPU} --data.image-size 32 --data.batch-size 12 --data.workers 0"


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A folder with a few photographs of three of the ten classes of shapes."""
    here = tmp_path_factory.mktemp("transfer")
    for split, count in (("train", 8), ("val", 40)):
        source = open_dataset(DataConfig(limit=1000), split)
        for label in (2, 5, 7):
            folder = here / split / source.classes[label]
            folder.mkdir(parents=True)
            for number in (source.labels == label).nonzero().flatten()[:count].tolist():
                Image.fromarray(source.pixels[number].numpy()).save(folder / f"{number}.png")
    return here


def train(words, folder):
    """Train, and return the folder of the run."""
    assert main(["train", *words.split(), "--run.dir", str(folder)]) == 0
    return folder


def test_trained_weights_help_where_images_are_few(photos, tmp_path):
    words = f"shapes {SHAPES} --epochs 2 --data.limit 3000 --data.batch-size 50"
    words += " --optim.name muon --optim.lr 0.01 --optim.warmup-epochs 0.3"
    weights = train(words, tmp_path / "donor") / "checkpoints/best.safetensors"
    words = f"{PHOTOS} {SHAPES} --data.root {photos} --epochs 15 --run.evaluate-every-epochs 15"
    words += " --optim.lr 5e-3 --optim.warmup-epochs 1"
    tuned = f"{words} --run.init-from {weights}"
    scratch = f"{words} --optim.no-freeze-bn --optim.layer-decay 1 --run.init-from="
    (probe, best), (other,) = (
        [row["val/top1"] for row in logged(train(words, tmp_path / name)) if "val/top1" in row]
        for name, words in (("tuned", tuned), ("scratch", scratch))
    )
    assert max(probe, best) > other + 0.1
    assert min(probe, best) > other


def test_a_run_that_begins_with_a_probe_is_the_same_on_two_processes(photos, tmp_path):
    # BatchNorm would see other images on two processes.
    model = build_model(ModelConfig("resnet9_gn", width=8), 3, 32)
    torch.save(model.state_dict(), tmp_path / "group.pth")
    words = f"{PHOTOS} --data.root {photos} --run.init-from {tmp_path}/group.pth"
    words += " --augment.policy none --model.name resnet9_gn --model.width 8"
    words += " --epochs 2 --optim.clip-norm 1 --run.log-every-steps 1"
    alone = losses(train(words, tmp_path / "on1"))
    python("train.py", *words.split(), "--run.dir", tmp_path / "on2", "--run.processes", "2")
    assert len(alone) == 7  # the probe, and twice two steps and a validation
    assert alone == pytest.approx(losses(tmp_path / "on2"), rel=1e-4)


def test_a_model_of_timm_learns_from_its_own_weights(photos, tmp_path, capsys):
    model = timm.create_model("test_vit", num_classes=7, img_size=32)
    path = tmp_path / "vit.pth"
    torch.save({"state_dict": model.state_dict()}, path)
    words = f"{PHOTOS} --data.root {photos} --model.name timm/test_vit --epochs 1"
    run = train(f"{words} --run.init-from {path}", tmp_path / "vit")
    assert f"weights from '{path}'; head is new" in capsys.readouterr().out
    assert main(["evaluate", str(run), "--device", "cpu"]) == 0
    assert "120 val images" in capsys.readouterr().out


def test_the_suggested_learning_rate_is_within_a_decade_of_a_good_one(tmp_path, capsys):
    words = "find-lr shapes --model.width 16 --data.batch-size 128 --data.limit 4000"
    words += f" --compute.device cpu --precision fp32 --run.dir {tmp_path} --low 3e-3 --steps 140"
    assert main(words.split()) == 0
    suggested = float(capsys.readouterr().out.splitlines()[-1].split()[-1])
    assert 0.025 < suggested < 2.5  # 0.5 is the preset's, for batches of 256: 0.25 for 128


@pytest.mark.parametrize(
    "recipe",  # on small images, on large ones, and a test on larger ones
    [
        "imagenet_rn50_16 --epochs 4 --run.evaluate-every-epochs 4 --data.image-size 96"
        " --data.test-size 128 --augment.min-size 64",
        "imagenet_vit_s --epochs 1 --data.image-size 64 --data.test-size 96",
    ],
)
def test_a_recipe_for_imagenet_trains(recipe, tmp_path):
    words = f"{recipe} {ON_CPU} --data.name shapes --data.root data --data.limit 16"
    words += " --data.batch-size 8 --data.workers 0 --optim.warmup-epochs 0 --run.processes 1"
    run = train(f"{words} --seed 1 --run.log-every-steps 1", tmp_path / "run")
    assert len(losses(run)) >= 3
    assert losses(run)[0] == pytest.approx(2.3, abs=0.7)  # of ten classes, not yet known
    assert "val/top1" in logged(run)[-1]
