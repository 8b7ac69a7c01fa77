"""Images that can't be read: a run ends and names them, or masks, counts and lists them."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from conftest import changed, run_ranks, write_photo
from torch import Tensor

from image_classifier.config import OptimConfig
from image_classifier.data import bad_images as bad_images_module
from image_classifier.data import decode
from image_classifier.data.loader import EvalData, TrainData
from image_classifier.data.samples import LEFT_OUT
from image_classifier.errors import FaultError, UserError
from image_classifier.evaluate import evaluate
from image_classifier.models import build_model
from image_classifier.optim import build_loss
from image_classifier.precision import Precision
from image_classifier.preprocess import Normalize
from image_classifier.runtime.distributed import World, join_world
from image_classifier.train import train

CPU = World(torch.device("cpu"))
BAD = {"train": ("ant/02.jpg", "bee/05.jpg"), "val": ("ant/04.jpg",)}
LISTED = ["train/ant/02.jpg", "train/bee/05.jpg", "val/ant/04.jpg"]
STEPS = 8  # two epochs
Seen = list[tuple[Tensor, ...]]


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory):
    """24 photographs to train on, of which 2 are not, and 10 for validation, of which 1 is not."""
    root = tmp_path_factory.mktemp("spoilt")
    for split, count in (("train", 24), ("val", 10)):
        for number in range(count):
            path = root / split / ("ant", "bee")[number % 2] / f"{number:02}.jpg"
            write_photo(path, number, size=(40 + number, 36))
        for name in BAD[split]:
            (root / split / name).write_bytes(b"<html>404</html>")
    return root


@pytest.fixture
def skipping(config, spoilt):
    """A run on them that passes over bad images, six to a batch."""
    Path(config.run.dir).mkdir()
    config = changed(config, data__name="folder", data__root=str(spoilt), data__limit=0)
    config = changed(config, data__batch_size=6, data__where="stream", data__workers=2)
    return changed(config, data__on_bad_image="skip", augment__crop="resized")


def seen(config, start=0, world=CPU):
    """Images, labels and indices of the batches from `start` on."""
    batches = TrainData(config, world).batches(start, STEPS)
    return [
        (batch.images.clone(), batch.labels.clone(), batch.indices.clone()) for batch in batches
    ]


def names_in(listed):
    """The names on a list of bad images, sorted."""
    return sorted(line.split("\t")[0] for line in listed.splitlines())


def test_a_bad_image_is_masked_in_its_place(skipping):
    data = TrainData(skipping, CPU)
    paths = data.source.paths
    is_bad = torch.tensor([os.fsdecode(paths.relative(i)) in BAD["train"] for i in range(24)])
    streamed = seen(skipping)
    for step, (images, labels, indices) in enumerate(streamed):
        assert torch.equal(indices, data.indices_at(step))
        bad = is_bad[indices]
        assert torch.equal(labels, data.source.labels[indices].masked_fill(bad, LEFT_OUT))
        assert not images[bad].any()
    for knobs in ({"data__workers": 0}, {"data__where": "host"}, {"data__where": "device"}):
        crop = "none" if "data__where" in knobs else "resized"
        others = seen(changed(skipping, augment__crop=crop, **knobs), start=3)
        for batch, other in zip(streamed[3:], others, strict=True):
            assert torch.equal(torch.stack(batch[1:]), torch.stack(other[1:]))
            assert crop == "none" or torch.equal(batch[0], other[0])


def test_the_loss_ignores_masked_images():
    logits = torch.randn(4, 2, generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss_of = build_loss(OptimConfig(label_smoothing=0.1), 4, torch.tensor([1.0, 3.0]))
    labels = torch.tensor([0, LEFT_OUT, 1, LEFT_OUT])
    loss = loss_of(logits, labels)
    loss.backward()
    assert torch.equal(loss, loss_of(logits[::2], labels[::2]))
    assert not logits.grad[1::2].any()
    assert logits.grad[::2].all()
    assert loss_of(logits[1::2], labels[1::2]) == 0


def on_a_rank(config):
    """Indices streamed and resident, the list of bad images, and an evaluation."""
    with join_world(config.compute) as world:
        streamed = [i for *_, indices in seen(config, world=world) for i in indices.tolist()]
        kept = changed(config, data__where="device", augment__crop="none")
        resident = [i for *_, indices in seen(kept, world=world) for i in indices.tolist()]
        precision = Precision("fp32", config.compute, config.optim, world.device)
        torch.manual_seed(0)
        model = build_model(config.model, 2, 32)
        data = EvalData(config.data, "val", world, config.run)
        scores = evaluate(model, data, Normalize(data.source, 32, precision), precision, world)
        assert world.all_true(True)
        listed = Path(config.run.dir, "bad_images.txt").read_text()
        counts = int(scores.confusion.sum()), scores.loss, scores.left_out
        return streamed, resident, listed, counts


def test_two_processes_see_and_count_what_one_does(skipping):
    skipping = changed(skipping, data__workers=0)
    (alone, _, _, (count, loss, left_out)) = on_a_rank(skipping)
    Path(skipping.run.dir, "bad_images.txt").unlink()
    ranks = run_ranks(2, on_a_rank, skipping)
    assert (count, left_out) == (9, 1)
    for half in range(2):  # streamed, and resident
        steps = zip(*(torch.tensor(rank[half]).view(STEPS, 3) for rank in ranks), strict=True)
        assert torch.cat([torch.cat(step) for step in steps]).tolist() == alone
    for rank in ranks:
        assert rank[3] == (count, pytest.approx(loss, rel=1e-6), left_out)
    assert names_in(ranks[0][2]) == LISTED


def test_a_run_says_how_many_were_skipped_and_lists_each_once(skipping, capsys):
    skipping = changed(skipping, run__log_every_steps=2, model__width=8, data__workers=0)
    train(skipping)
    folder = Path(skipping.run.dir)
    said = capsys.readouterr().out
    assert f"2 images could not be read and were skipped: {folder}" in said
    assert "without 1 that could not be read" in said
    listed = (folder / "bad_images.txt").read_text()
    assert names_in(listed) == LISTED
    assert listed.count("\tnot a JPEG") == 3
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row.get("data/bad_images") for row in rows if "train/loss" in row][-1] == 3
    assert [row["val/bad_images"] for row in rows if "val/top1" in row][-1] == 1
    seen(skipping)  # as a run does that goes on
    assert (folder / "bad_images.txt").read_text() == listed


@pytest.mark.parametrize("where", ["stream", "auto"])
def test_evaluation_leaves_out_what_cannot_be_read_or_stops(skipping, where):
    config = changed(skipping, data__where=where)
    data = EvalData(config.data, "val", CPU, config.run)
    for _ in range(2):
        labels = torch.cat([batch.labels.clone() for batch in data.batches()])
        assert labels.tolist() == [LEFT_OUT if i == 2 else i // 5 for i in range(10)]
    data.close()
    stopping = changed(config, data__on_bad_image="stop").data
    with pytest.raises(UserError, match=r"cannot read image .*ant/04\.jpg"):
        list(EvalData(stopping, "val", CPU).batches())


def test_too_many_bad_images_end_the_run(skipping, monkeypatch):
    monkeypatch.setattr(bad_images_module, "MOST", 1)
    with pytest.raises(FaultError, match=r"2 of 24 images can't be read; .*bad_images\.txt' lists"):
        seen(skipping)
    assert len(Path(skipping.run.dir, "bad_images.txt").read_text().splitlines()) == 2


def test_a_file_that_vanishes_while_training_is_told_or_skipped(skipping, photos, tmp_path):
    root = Path(shutil.copytree(photos, tmp_path / "own"))
    lost = (root / "train" / "ant" / "0.jpg").rename(root / "train" / "ant" / "new\nline.jpg")
    skipping = changed(skipping, data__root=str(root), data__batch_size=4)
    skip, stop = (
        TrainData(changed(skipping, data__on_bad_image=kind), CPU) for kind in ("skip", "stop")
    )
    lost.unlink()
    with pytest.raises(UserError, match=r"new\\nline\.jpg': No such file or directory"):
        list(stop.batches(0, 4))
    assert len(list(skip.batches(0, 4))) == 4
    listed = Path(skipping.run.dir, "bad_images.txt").read_text()
    assert listed == "train/ant/new\\x0aline.jpg\tNo such file or directory\n"


def test_what_the_system_lacks_is_not_the_fault_of_a_file(monkeypatch):
    def refuse(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(FaultError, match=r"no more images can be read: Too many open files, at"):
        decode.read_image(Path("x.jpg"))
