"""Training images are scored as validation images are, and the hardest are shown."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import Shown, changed, logged, mixed
from safetensors.torch import load_file

from image_classifier.data import DATASETS, EvalData, Source
from image_classifier.data.datasets.shapes import shapes
from image_classifier.evaluate import evaluate
from image_classifier.runtime.distributed import World
from image_classifier.tools.train_score import observer
from image_classifier.train import train


@pytest.mark.usefixtures("train_scores")
def test_each_evaluation_scores_training_images_by_the_weights_it_evaluates(config, monkeypatch):
    config = changed(config, optim__ema_decay=0.5, **mixed(mixup=1.0))
    expected = []

    def compared(model, sample, *how):
        whole = EvalData(config.data, "train", sample.world)
        expected.append(evaluate(model, whole, *how).value("top1"))
        return evaluate(model, sample, *how)

    monkeypatch.setattr(observer, "evaluate", compared)
    train(config)
    rows = [row for row in logged(config.run.dir) if "val/top1" in row]
    assert [row["train/top1"] for row in rows] == expected
    assert len(expected) == 2


@pytest.mark.usefixtures("train_scores")
def test_a_run_is_the_same_with_it(config, trained_once):
    train(config)
    assert any("train/top1" in row for row in logged(config.run.dir))
    assert not any("train/top1" in row for row in logged(trained_once))
    best = "checkpoints/best.safetensors"
    weights = load_file(Path(config.run.dir, best))
    torch.testing.assert_close(load_file(trained_once / best), weights, rtol=0, atol=0)


@pytest.mark.usefixtures("train_scores")
def test_an_unreadable_training_image_does_not_count_whatever_the_metric(on_spoilt_photos):
    pytest.importorskip("image_classifier.tools.skip_bad_images")
    config = changed(on_spoilt_photos, data__on_bad_image="skip", data__workers=0, epochs=1)
    Path(config.data.root, "train/ant/0.jpg").write_text("no image")
    train(changed(config, run__best_by="auroc"))
    assert "train/auroc" in logged(config.run.dir)[-1]


@pytest.mark.usefixtures("train_scores")
def test_images_without_weight_are_scored_like_others(config, monkeypatch):
    weights = (torch.arange(64) % 16 == 1).float()
    own = lambda data, split: replace(shapes(data, split), weights=weights)  # noqa: E731
    monkeypatch.setitem(DATASETS, "own", own)
    monkeypatch.setattr(observer, "MOST", 16)
    train(changed(config, data__name="own", data__batch_size=16))
    assert "train/top1" in logged(config.run.dir)[-1]


@pytest.mark.parametrize(
    ("num_train", "num_val", "batch_size", "sizes"),
    [
        (900, 300, 128, [128, 128, 44]),
        (5000, 1000, 128, [128, 128, 128]),
        (5000, 5000, 2048, [2048]),
        (100, 300, 128, [100]),  # there are no more
    ],
)
def test_batches_have_sizes_that_validation_has(num_train, num_val, batch_size, sizes):
    class Images(SimpleNamespace):
        def __len__(self):
            return len(self.indices)

    def images(count):
        pixels = torch.zeros(count, 8, 8, 3, dtype=torch.uint8)
        source = Source(torch.arange(count), tuple(map(str, range(count))), pixels)
        data = SimpleNamespace(image_size=8, fit="crop")
        indices = torch.arange(count)
        return Images(source=source, indices=indices, batch_size=batch_size, data=data)

    world = World(torch.device("cpu"))
    setup = SimpleNamespace(train_data=images(num_train), val_data=images(num_val), world=world)
    batches = list(observer.TrainSample(setup).batches())
    assert [len(batch.images) for batch in batches] == sizes
    labels = torch.cat([batch.labels for batch in batches])
    assert labels.equal(torch.arange(sum(sizes)) * num_train // sum(sizes))


@pytest.mark.usefixtures("pages", "train_scores")
def test_the_page_has_both_curves_and_at_the_end_the_hardest_training_images(config, monkeypatch):
    pytest.importorskip(f"{observer.__package__.rpartition('.')[0]}.report")
    found = []
    score = observer.evaluate
    monkeypatch.setattr(observer, "evaluate", lambda *all_: found.append(score(*all_)) or found[-1])
    train(config)
    shown = Shown(Path(config.run.dir, "report.html").read_text(encoding="utf-8"))
    said = " ".join(" ".join(shown.words).split())
    assert f"train {100 * found[-1].value('top1'):.4g}% val " in said
    title = "Hardest training images Of 64 training images, by the weights of the last evaluation."
    _, _, hardest = said.partition(title)
    targets = found[-1].predictions.target_probability.sort().values[: observer.PICTURES]
    assert {f"{share:.1%}" for share in targets.tolist()} <= {*re.findall(r"[0-9.]+%", hardest)}
