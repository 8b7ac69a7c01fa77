"""The learning curve: what it is made of, and what it says of more images."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from conftest import changed, run_ranks, tiny, train_until

pytest.importorskip("image_classifier.tools.linear_probe")
pytest.importorskip("image_classifier.tools.runs")

from image_classifier.errors import UserError
from image_classifier.runtime.distributed import World
from image_classifier.tools.advice import learning_curve as advice
from image_classifier.tools.advice.learning_curve import (
    SHARES,
    Images,
    curve_of,
    draw_share,
    learning_curve,
    more_images,
)
from image_classifier.train import train


def test_a_share_has_images_of_each_class_and_grows_by_others():
    labels = torch.tensor([0] * 40 + [1] * 20 + [2] * 3)
    parts = [draw_share(labels, share, 7) for share in SHARES]
    assert [len(part) for part in parts] == [5 + 2 + 1, 10 + 5 + 1, 20 + 10 + 2, 63]
    for few, more in pairwise(parts):
        assert {*few.tolist()} < {*more.tolist()}


def blobs(count, distance):
    """Features of two classes so far apart."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(2 * count) % 2
    values = torch.randn(2 * count, 16, generator=generator)
    values[:, :8] += distance * labels[:, None]
    return Images(values[:count], labels[:count], values[count:], labels[count:])


@pytest.mark.parametrize(
    ("distance", "said"),
    [
        (0.7, r"128 images in place of 16: \+\d.*; as many again would gain about \+\d"),
        (0, "more of the same kind may not help"),
    ],
)
def test_more_images_are_advised_where_they_have_helped(distance, said, monkeypatch):
    monkeypatch.setattr(advice, "DRAWS", 2)
    images = blobs(128, distance)
    assert re.search(said, more_images(curve_of(images, seed=0)))


def test_a_row_has_as_many_images_as_were_drawn_of_small_classes():
    images = blobs(6, 5)
    rows = curve_of(images, seed=0)
    assert [*rows] == [2, 4, 6]  # an eighth and a quarter of three are one image
    assert more_images(rows).startswith("6 images in place of 2: ")
    alone = Images(images.train[:2], images.train_labels[:2], images.val, images.val_labels)
    assert more_images(curve_of(alone, seed=0)) == "2 images are too few of each class for a curve"


def test_each_draw_of_a_share_has_other_images(monkeypatch):
    monkeypatch.setattr(advice, "SHARES", (0.125,))
    monkeypatch.setattr(advice, "DRAWS", 2)
    rows = curve_of(blobs(128, 0.7), seed=0)
    assert len({tuple(found.tolist()) for found in rows[min(rows)]}) > 1


def test_the_interval_of_a_gain_is_that_of_paired_differences_and_never_narrow():
    more, fewer = torch.tensor([1.0] * 60 + [0.0] * 40), torch.tensor([1.0] * 40 + [0.0] * 60)
    gain, width = advice.mean_gain(more, fewer)
    deviation = (20 * 0.8**2 + 80 * 0.2**2) / 99
    assert (gain, width) == pytest.approx((0.2, 1.96 * (deviation / 100) ** 0.5))
    assert advice.mean_gain(more, more) == pytest.approx((0, 1.96 * 0.5 / 100))


def test_what_as_many_images_again_would_gain_goes_on_by_the_power_law():
    right = {100: 600, 200: 800}  # of 1,000: twice as many images, half as many errors
    rows = {size: [torch.arange(1000).lt(most).double()] for size, most in right.items()}
    told = "200 images in place of 100: +20.0 points (95 %: +17.5 .. +22.5)"
    assert more_images(rows) == f"{told}; as many again would gain about +10.0, by the curve"
    assert advice.mean_score([*rows[100], *rows[200]]) == pytest.approx(0.7)


@pytest.fixture
def from_weights(trained_once, tmp_path):
    """A tiny run that begins with the weights of another."""
    config = tiny(tmp_path / "run")
    return changed(config, run__init_from=str(trained_once / "checkpoints" / "best.pt"))


def test_the_curve_is_printed_and_written(from_weights, capsys, monkeypatch):
    own = advice.features_of
    seen = []

    def features_of(config, world):
        seen.append(own(config, world))
        return seen[-1]

    monkeypatch.setattr(advice, "features_of", features_of)
    learning_curve(from_weights)
    assert not torch.equal(seen[0].train, seen[0].val)
    said = capsys.readouterr().out
    assert re.search(r"\n +1\d  \d+\.\d\d% \(mean of 4 draws\)\n(.*draws\)\n)+ +64  \d+", said)
    assert "\nimages of 64 pixels in place of 32: " in said or "of 48 pixels" in said
    found = json.loads(Path(from_weights.run.dir, "learning_curve.json").read_text())
    counts = [*map(int, found["top1"])]
    assert counts == sorted(counts)
    assert counts[-1] == 64
    assert len(found["said"]) == 2
    (larger,) = found["image_size"].values()
    assert f": {100 * (larger - found['top1']['64']):+.1f} points" in found["said"][1]


def test_images_that_cannot_be_read_are_none_of_the_curve(on_spoilt_photos):
    pytest.importorskip("image_classifier.tools.skip_bad_images")
    config = changed(on_spoilt_photos, data__on_bad_image="skip")
    found = advice.features_of(config, World(torch.device("cpu")))
    assert (len(found.train), found.train_labels.bincount().tolist()) == (10, [5, 5])
    assert (len(found.val), found.val_labels.bincount().tolist()) == (3, [1, 2])


def test_a_network_for_images_of_one_size_has_its_curve(from_weights, monkeypatch, capsys):
    own = advice.features_of

    def of_one_size(config, world):
        if config.data.image_size > from_weights.data.image_size:
            raise UserError("the weights do not fit the model")
        return own(config, world)

    monkeypatch.setattr(advice, "features_of", of_one_size)
    learning_curve(from_weights)
    assert "pixels were not tried: the weights do not fit the model\n" in capsys.readouterr().out
    found = json.loads(Path(from_weights.run.dir, "learning_curve.json").read_text())
    assert "image_size" not in found


def test_larger_images_are_those_of_evaluation_too(from_weights, monkeypatch):
    sizes = []

    def features_of(config, _):
        sizes.append(config.data.eval_size)
        return blobs(4, 1)

    monkeypatch.setattr(advice, "features_of", features_of)
    monkeypatch.setattr(advice, "SHARES", (1.0,))
    learning_curve(changed(from_weights, data__test_size=48))
    assert sizes == [48, 64]


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"run__init_from": ""}, "needs trained weights"),
        ({"model__task": "multi-label"}, "one label each"),
    ],
)
def test_what_has_no_curve_is_refused(from_weights, knobs, said):
    with pytest.raises(UserError, match=said):
        learning_curve(changed(from_weights, **knobs))


def refused_on_rank(config):
    """What each of several ranks says of the curve."""
    with pytest.raises(UserError) as refused:
        learning_curve(config)
    return str(refused.value)


def test_several_processes_do_not_write_one_curve(from_weights):
    said = run_ranks(2, refused_on_rank, from_weights)
    assert said == ["learning-curve is one process: start it without torchrun"] * 2


def test_a_run_ends_with_what_fine_tuning_gained_though_it_was_stopped(from_weights, capsys):
    config = changed(from_weights, data__name="shapes", run__init_head="probe")
    train(changed(config, run__dir=f"{config.run.dir}-whole"))
    whole = re.search("fine-tuning gained .*", capsys.readouterr().out)
    train_until(config, 5, kill=False)
    assert "fine-tuning" not in capsys.readouterr().out
    train(config)
    assert whole[0] in capsys.readouterr().out
