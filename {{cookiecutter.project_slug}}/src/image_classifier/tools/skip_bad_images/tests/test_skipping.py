"""Images that can't be read are masked, counted and listed, and not too many of them."""

from pathlib import Path

import pytest
import torch
from conftest import BAD, changed, logged, losses, run_ranks
from torch.utils.data import Dataset

from image_classifier.data import decode
from image_classifier.data.datasets import DATASETS, open_dataset
from image_classifier.data.loader import TrainData
from image_classifier.data.samples import LEFT_OUT
from image_classifier.errors import FaultError
from image_classifier.runtime import platform
from image_classifier.runtime.distributed import World
from image_classifier.tools.skip_bad_images import (
    unreadable as bad_images,
)
from image_classifier.train import train

CPU = World(torch.device("cpu"))
NO_IMAGE = f"not a {', '.join(decode.FORMATS)} file"


@pytest.fixture
def skipping(on_spoilt_photos):
    """A run that passes over them."""
    return changed(on_spoilt_photos, data__on_bad_image="skip")


def listed(config):
    """The list of bad images of a run: a name and a reason in each line."""
    return Path(config.run.dir, "bad_images.txt").read_text().splitlines()


@pytest.mark.parametrize(
    ("where", "workers", "method"),
    [("stream", 2, ""), ("stream", 1, "forkserver"), ("host", 0, ""), ("device", 0, "")],
)
def test_a_bad_image_is_masked_in_its_place(skipping, where, workers, method, monkeypatch):
    monkeypatch.setattr(platform, "START_METHOD", method or platform.START_METHOD)
    data = TrainData(changed(skipping, data__where=where, data__workers=workers), CPU)
    is_bad = torch.tensor([data.source.name(index).endswith((*BAD,)) for index in range(12)])
    labels = data.source.labels.masked_fill(is_bad, LEFT_OUT)
    for step, batch in enumerate(data.batches(2, 6), start=2):
        assert torch.equal(batch.indices, data.indices_at(step))
        assert torch.equal(batch.labels, labels[batch.indices])
        assert torch.equal(batch.images.flatten(1).any(1), ~is_bad[batch.indices])  # black


def test_a_run_that_starts_over_lists_its_own_bad_images_alone(skipping):
    config = changed(skipping, data__where="device", run__fresh=True, epochs=1)
    Path(config.run.dir).mkdir(parents=True, exist_ok=True)
    Path(config.run.dir, "bad_images.txt").write_text("old.jpg\tof another run\n")
    train(config)
    assert len(listed(config)) == len(BAD)
    assert "old.jpg" not in "".join(listed(config))


@pytest.mark.parametrize("where", ["stream", "device"])
def test_labels_of_a_bad_image_are_unknown_if_there_are_several(skipping, where, tmp_path):
    pytest.importorskip("image_classifier.tools.label_table")
    names = [f"train/{('ant', 'bee')[n % 2]}/{n}.jpg" for n in range(12)]  # 2 is bad, 5 is missing
    rows = "".join(f"{name},{name[6:9]}|all\n" for name in names)
    (tmp_path / "labels.csv").write_text("path,label,split\n" + rows.replace("\n", ",train\n"))
    with (tmp_path / "labels.csv").open("a") as file:
        file.write("val/ant/14.jpg,ant,val\n")
    own = {"data__labels": str(tmp_path / "labels.csv"), "data__where": where, "data__workers": 0}
    data = TrainData(changed(skipping, **own, model__task="multi-label"), CPU)
    for batch in data.batches(0, 3):
        for index, label in zip(batch.indices.tolist(), batch.labels.tolist(), strict=True):
            is_bad = index in (2, 5)
            assert label == ([LEFT_OUT] * 3 if is_bad else [1, 1 - index % 2, index % 2])
    assert [line.partition("\t")[0] for line in sorted(listed(skipping))] == [names[2], names[5]]


@pytest.mark.parametrize(("where", "crop"), [("stream", "resized"), ("device", "none")])
def test_a_run_counts_and_lists_each_once_on_one_rank_and_on_two(skipping, capsys, where, crop):
    config = changed(skipping, data__where=where, augment__crop=crop, data__workers=0)
    config = changed(config, model__width=8, optim__lr=0.0, run__log_every_steps=1)
    on_two = changed(config, run__dir=f"{config.run.dir}-2")
    for run, found in ((config, [train(config)]), (on_two, run_ranks(2, train, on_two))):
        list(TrainData(run, CPU).batches(0, 3))  # as a run does that goes on
        for scores in found:
            counts = scores.predictions.class_counts().tolist()
            assert (counts, scores.predictions.num_unread) == ([1, 2], 1)
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
def test_too_many_bad_images_end_a_run(skipping, where, monkeypatch):
    monkeypatch.setattr(bad_images, "MOST", 1)
    with pytest.raises(FaultError, match=r"2 of 12 images can't be read; .*bad_images\.txt' lists"):
        list(TrainData(changed(skipping, data__where=where), CPU).batches(0, 3))
    assert len(listed(skipping)) == 2


def test_bad_images_that_several_processes_meet_are_too_many_together(skipping, monkeypatch):
    monkeypatch.setattr(bad_images, "MOST", 1)
    source, other = (open_dataset(skipping.data, split) for split in ("train", "val"))
    first, second = (
        bad_images.BadImages(source, skipping.data, skipping.run.dir) for _ in range(2)
    )
    bad_images.BadImages(other, skipping.data, skipping.run.dir).note(0, "of another split")
    first.note(3, "damaged")
    first.note(3, "damaged")
    with pytest.raises(FaultError, match=r"2 of 12 images can't be read"):
        second.note(5, "damaged")


def test_files_that_were_mended_since_an_earlier_start_are_not_too_many(skipping, monkeypatch):
    monkeypatch.setattr(bad_images, "MOST", 1)
    with pytest.raises(FaultError, match=r"2 of 12 images can't be read"):
        list(TrainData(skipping, CPU).batches(0, 3))
    photo = Path(skipping.data.root, "train/ant/0.jpg")
    Path(skipping.data.root, BAD[0]).write_bytes(photo.read_bytes())
    assert len(list(TrainData(skipping, CPU).batches(0, 3))) == 3


class Spoilt(Dataset):
    """Gray images of two classes, one of which can't be read."""

    targets = [0, 1] * 12

    def __len__(self):
        return 24

    def __getitem__(self, index):
        if index == 7:
            raise OSError("image file is truncated")
        return torch.full((40, 36, 3), 9 * index).byte(), self.targets[index]


def test_an_image_of_a_torch_dataset_is_listed_by_its_number(config, monkeypatch):
    pytest.importorskip("image_classifier.tools.torch_dataset")
    monkeypatch.setitem(DATASETS, "mine", lambda _data, _split: Spoilt())
    config = changed(config, data__name="mine", data__limit=0, data__batch_size=6, epochs=1)
    found = train(changed(config, data__on_bad_image="skip", model__width=8)).predictions
    assert (int(found.class_counts().sum()), found.num_unread) == (23, 1)
    assert listed(config) == ["image 7\timage file is truncated"]
