"""Images that can't be read: a run ends and names them, or masks, counts and lists them."""

import errno
import os
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import changed, logged, losses, run_ranks

from image_classifier.config import OptimConfig
from image_classifier.data import bad_images, decode
from image_classifier.data.loader import EvalData, TrainData
from image_classifier.data.samples import LEFT_OUT
from image_classifier.errors import FaultError, UserError
from image_classifier.optim import build_loss
from image_classifier.runtime.distributed import World
from image_classifier.train import train

CPU = World(torch.device("cpu"))
NO_IMAGE = f"not a {', '.join(decode.FORMATS)} file"
BAD = ["train/ant/2.jpg", "train/bee/new\nline.jpg", "val/ant/12.jpg"]


@pytest.fixture
def skipping(on_photos, photos, tmp_path):
    """A run that passes over them: 2 of 12 images to train on, and 1 of 4 for validation."""
    root = shutil.copytree(photos, tmp_path / "spoilt")
    for name in (BAD[0], BAD[2]):
        (root / name).write_bytes(b"<html>404</html>")
    (root / "train/bee/5.jpg").unlink()
    (root / BAD[1]).symlink_to("nowhere.jpg")
    Path(on_photos.run.dir).mkdir()
    config = changed(on_photos, data__root=str(root), data__on_bad_image="skip", data__limit=0)
    return changed(config, data__where="stream", data__workers=2, augment__crop="resized")


def listed(config):
    """The list of bad images of a run: a name and a reason in each line."""
    return Path(config.run.dir, "bad_images.txt").read_text().splitlines()


@pytest.mark.parametrize(("where", "workers"), [("stream", 2), ("host", 0), ("device", 0)])
def test_a_bad_image_is_masked_in_its_place(skipping, where, workers):
    data = TrainData(changed(skipping, data__where=where, data__workers=workers), CPU)
    is_bad = torch.tensor([data.source.name(index).endswith((*BAD,)) for index in range(12)])
    labels = data.source.labels.masked_fill(is_bad, LEFT_OUT)
    for step, batch in enumerate(data.batches(2, 6), start=2):
        assert torch.equal(batch.indices, data.indices_at(step))
        assert torch.equal(batch.labels, labels[batch.indices])
        assert torch.equal(batch.images.flatten(1).any(1), ~is_bad[batch.indices])  # black


def test_the_loss_ignores_masked_images():
    logits = torch.randn(4, 2, generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss_of = build_loss(OptimConfig(label_smoothing=0.1), 4, torch.tensor([1.0, 3.0]))
    labels = torch.tensor([0, LEFT_OUT, 1, LEFT_OUT])
    loss = loss_of(logits, labels)
    loss.backward()
    assert torch.equal(loss, loss_of(logits[::2], labels[::2]))
    assert logits.grad.all(1).tolist() == [True, False] * 2
    assert loss_of(logits[1::2], labels[1::2]) == 0


@pytest.mark.parametrize(("where", "crop"), [("stream", "resized"), ("device", "none")])
def test_a_run_counts_and_lists_each_once_on_one_rank_and_on_two(skipping, capsys, where, crop):
    config = changed(skipping, data__where=where, augment__crop=crop, data__workers=0)
    config = changed(config, model__width=8, optim__lr=0.0, run__log_every_steps=1)
    on_two = changed(config, run__dir=f"{config.run.dir}-2")
    for run, found in ((config, [train(config)]), (on_two, run_ranks(2, train, on_two))):
        list(TrainData(run, CPU).batches(0, 3))  # as a run does that goes on
        for scores in found:
            assert (scores.confusion.sum(1).tolist(), scores.left_out) == ([1, 2], 1)
        assert sorted(listed(run)) == [
            f"train/ant/2.jpg\t{NO_IMAGE}",
            "train/bee/new\\x0aline.jpg\tNo such file or directory",
            f"val/ant/12.jpg\t{NO_IMAGE}",
        ]
        step, evaluation = logged(run.run.dir)[-2:]
        assert (step["data/bad_images"], evaluation["val/bad_images"]) == (3, 1)
    # With weights that stay, losses are those of the images that count.
    assert losses(on_two.run.dir) == pytest.approx(losses(config.run.dir), rel=1e-6)
    said = capsys.readouterr().out
    assert f"2 images could not be read and were skipped: {config.run.dir}" in said
    assert "without 1 that could not be read" in said


@pytest.mark.parametrize("where", ["stream", "device"])
def test_bad_images_end_what_may_not_skip_them_or_not_so_many(skipping, where, monkeypatch):
    skipping = changed(skipping, data__where=where)
    stopping = changed(skipping, data__on_bad_image="stop")
    with pytest.raises(UserError, match=r"cannot read image .*(ant/2\.jpg'|line\.jpg'): (not|No) "):
        list(TrainData(stopping, CPU).batches(0, 3))
    with pytest.raises(UserError, match=r"cannot read image .*ant/12\.jpg': not a JPEG"):
        list(EvalData(stopping.data, "val", CPU).batches())
    monkeypatch.setattr(bad_images, "MOST", 1)
    with pytest.raises(FaultError, match=r"2 of 12 images can't be read; .*bad_images\.txt' lists"):
        list(TrainData(skipping, CPU).batches(0, 3))
    assert len(listed(skipping)) == 2


def test_what_the_system_lacks_is_not_the_fault_of_a_file(monkeypatch):
    error = OSError(errno.EMFILE, "Too many open files")
    monkeypatch.setattr(os, "open", Mock(side_effect=error))
    with pytest.raises(FaultError, match=r"no more images can be read: Too many open files, at"):
        decode.read_image(Path("x.jpg"))
