"""Weights of others start a run: files of torchvision, timm and this project; one download."""

import json
from pathlib import Path

import pytest
import timm
import torch
from conftest import python

STORY = """
import json, sys
from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image

from image_classifier.runtime import distributed
from image_classifier.config import DataConfig
from image_classifier.data.datasets import open_dataset
from image_classifier.models import build_model
from image_classifier.presets import finetune, shapes
from image_classifier.train import train

distributed.num_cores = lambda: 1
here = Path(sys.argv[1])

# Ten classes, many images.
base = shapes()
base = replace(
    base,
    epochs=2,
    precision="fp32",
    data=replace(base.data, limit=3000, batch_size=50),
    augment=replace(base.augment, crop="none"),
    model=replace(base.model, width=16),
    optim=replace(base.optim, name="muon", lr=0.01, warmup_epochs=0.3),
    run=replace(base.run, dir=str(here / "donor"), trackers=()),
)
train(base)

# Three of them as a folder of photographs, a few of each.
for split, count in (("train", 8), ("val", 40)):
    source = open_dataset(DataConfig(limit=1000), split)
    for label in (2, 5, 7):
        folder = here / "photos" / split / source.classes[label]
        folder.mkdir(parents=True)
        for number in (source.labels == label).nonzero().flatten()[:count].tolist():
            Image.fromarray(source.pixels[number].numpy()).save(folder / f"{number}.png")

preset = finetune()
tuned = replace(
    preset,
    epochs=15,
    precision="fp32",
    data=replace(preset.data, root=str(here / "photos"), image_size=32, batch_size=12, workers=0),
    augment=base.augment,
    model=base.model,
    optim=replace(preset.optim, lr=5e-3, frozen_epochs=3.0),
    run=replace(
        base.run,
        dir=str(here / "tuned"),
        init_from=str(here / "donor/checkpoints/best.safetensors"),
        evaluate_every_epochs=15,
    ),
)
scratch = replace(
    tuned,
    optim=replace(tuned.optim, frozen_epochs=0.0, layer_decay=1.0),
    run=replace(tuned.run, dir=str(here / "scratch"), init_from=""),
)
# BatchNorm would see other images on two processes.
model = replace(base.model, name="resnet9_gn", width=8)
torch.save(build_model(model, 3, 32).state_dict(), here / "group.pth")
print(json.dumps([train(config).top1 for config in (tuned, scratch)]))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where a run on many images, and two on few, have been."""
    here = tmp_path_factory.mktemp("transfer")
    (here / "story.py").write_text(f"import sys; sys.path.insert(0, 'src')\n{STORY}")
    (here / "top1.json").write_text(python(str(here / "story.py"), str(here)).splitlines()[-1])
    return here


def test_trained_weights_help_where_images_are_few(place: Path) -> None:
    tuned, scratch = json.loads((place / "top1.json").read_text())
    assert tuned > scratch + 0.1
    rows = (place / "tuned" / "metrics.jsonl").read_text()
    assert json.loads(rows.splitlines()[-1])["val/top1"] == tuned


def test_a_frozen_start_is_the_same_on_two_processes(place: Path) -> None:
    words = f"finetune --data.root {place}/photos --data.image-size 32 --data.batch-size 12"
    words += " --data.workers 0 --augment.policy none --model.name resnet9_gn --model.width 8"
    words += f" --run.init-from {place}/group.pth --run.trackers"
    words += " --epochs 2 --precision fp32 --compute.device cpu --optim.frozen-epochs 1"
    words += " --optim.clip-norm 1 --run.log-every-steps 1"
    losses = []
    for processes in ("1", "2"):
        folder = place / f"on{processes}"
        words_here = [*words.split(), "--run.dir", str(folder), "--run.processes", processes]
        python("train.py", *words_here)
        rows = [json.loads(row) for row in (folder / "metrics.jsonl").read_text().splitlines()]
        losses.append([row["train/loss"] for row in rows if "train/loss" in row])
    assert len(losses[0]) == 4  # two steps before the thaw, and two after it
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_model_of_timm_learns_from_its_own_weights(place: Path) -> None:
    model = timm.create_model("test_vit", num_classes=7, img_size=32)
    path = place / "vit.pth"
    torch.save({"state_dict": model.state_dict()}, path)
    words = f"finetune --data.root {place}/photos --data.image-size 32 --data.batch-size 12"
    words += f" --data.workers 0 --model.name timm/test_vit --run.init-from {path}"
    words += f" --epochs 1 --run.trackers --run.dir {place}/vit --compute.device cpu"
    said = python("train.py", *words.split())
    assert f"weights from '{path}'; head is new, for other classes" in said
    evaluated = python("-c", EVALUATE, "evaluate", f"{place}/vit", "--device", "cpu")
    assert "120 val images" in evaluated


EVALUATE = """
import sys
sys.path.insert(0, "src")
from image_classifier.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_the_suggested_learning_rate_is_within_a_decade_of_a_good_one(tmp_path: Path) -> None:
    words = "find-lr shapes --model.width 16 --data.batch-size 128 --data.limit 4000"
    words += f" --compute.device cpu --precision fp32 --dir {tmp_path}/lr --low 1e-4"
    said = python("-c", EVALUATE, *words.split())
    suggested = float(said.splitlines()[-1].split()[-1])
    assert 0.025 < suggested < 2.5  # 0.5 is the preset's, for batches of 250: 0.25 for 128
