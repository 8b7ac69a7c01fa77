"""Fine-tuning begins with a linear probe, and never ends more than an image below it."""

import os
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import changed, logged, needs_fork, run_ranks, train_until
from safetensors.torch import save_file
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from test_resume import assert_same, final
from torch import nn

from image_classifier.checkpoints.reading import (
    load_best,
    read_checkpoint,
)
from image_classifier.config import ModelConfig
from image_classifier.data import DATASETS, LEFT_OUT, Source
from image_classifier.data.datasets.shapes import shapes
from image_classifier.data.loader import EvalData
from image_classifier.errors import FaultError, UserError
from image_classifier.models import build_model
from image_classifier.runtime.distributed import World
from image_classifier.tools.linear_probe import features
from image_classifier.tools.linear_probe import (
    head as linear_probe,
)
from image_classifier.tools.linear_probe.head import (
    fit_classes,
    fit_labels,
)
from image_classifier.train import train

ALONE = World(torch.device("cpu"))
SMALL = ModelConfig(name="resnet9_gn", width=8)


@pytest.fixture
def finetuned(config, tmp_path):
    """A run of two epochs that begins with weights for other classes."""
    torch.manual_seed(0)
    save_file(build_model(SMALL, 7, 32).state_dict(), tmp_path / "w.safetensors")
    config = changed(config, model=SMALL, run__init_from=str(tmp_path / "w.safetensors"))
    return changed(config, optim__ema_decay=0.9, run__evaluate_every_epochs=0.5)


def evaluations(run):
    """Step and top-1 of each evaluation of a run."""
    return [(row["step"], row["val/top1"]) for row in logged(run.run.dir) if "val/top1" in row]


def best_of(run):
    """The best weights of a run."""
    return load_best(Path(run.run.dir, "checkpoints/best.pt"))


def test_where_training_only_harms_the_best_weights_are_those_of_the_probe(finetuned, capsys):
    harmed = changed(finetuned, optim__lr=10.0, optim__clip_norm=1.0, optim__ema_decay=0.0)
    train(harmed)
    (begin, probe), *others = evaluations(harmed)
    assert begin == 0
    assert max(top1 for _, top1 in others) < probe
    assert best_of(harmed).step == 0
    assert f"linear probe: top-1 {probe:.2%}" in capsys.readouterr().out
    alone = changed(finetuned, epochs=0.0, run__dir=f"{finetuned.run.dir}-probe")
    assert train(alone).value("top1") == probe
    assert evaluations(alone) == [(0, probe)]
    assert_same(best_of(alone).weights, best_of(harmed).weights)


def test_a_run_that_is_killed_in_its_first_steps_ends_as_an_unbroken_one(finetuned, tmp_path):
    unbroken = changed(finetuned, run__dir=str(tmp_path / "unbroken"))
    train(unbroken)
    for step in (1, 3):
        train_until(finetuned, step, kill=False)
    folder = Path(finetuned.run.dir, "checkpoints")
    saved = [read_checkpoint(folder / f"step_0000000{step}.pt") for step in (0, 2)]
    probe, after = (one["state"]["model"]["head.weight"].norm() for one in saved)
    assert after < 0.5 * probe  # all layers began to learn with a softer one
    train(finetuned)
    assert_same(final(finetuned), final(unbroken))
    assert evaluations(finetuned) == evaluations(unbroken)


@pytest.mark.parametrize("is_frozen", [True, False])
def test_batchnorm_keeps_the_statistics_of_pretrained_weights(is_frozen, config, tmp_path):
    model = ModelConfig(name="resnet9", width=8)
    published = build_model(model, 7, 32).state_dict()
    save_file(published, tmp_path / "w.safetensors")
    config = changed(config, model=model, run__init_from=str(tmp_path / "w.safetensors"))
    train(changed(config, optim__freeze_bn=is_frozen))
    trained = final(config)["state"]["model"]
    moved = {name for name, w in published.items() if w.shape == trained[name].shape}
    moved = {name for name in moved if not torch.equal(published[name], trained[name])}
    statistics = {name for name in published if "running_" in name}
    assert statistics & moved == (set() if is_frozen else statistics)
    assert "stem.0.weight" in moved


def test_a_probe_is_the_same_on_two_processes(finetuned, tmp_path):
    probe = changed(finetuned, epochs=0.0, data__cache=str(tmp_path / "features"))
    train(probe)
    alone = best_of(probe).weights["head.weight"]
    shutil.rmtree(tmp_path / "features")
    run_ranks(2, train, changed(probe, run__fresh=True))
    together = best_of(probe).weights["head.weight"]
    torch.testing.assert_close(alone, together, rtol=1e-3, atol=1e-4)


def test_a_last_layer_that_can_not_be_fitted_begins_at_zero_and_says_why(
    finetuned, monkeypatch, capsys
):
    class Images(SimpleNamespace):
        classes, is_multi_label = tuple("abc"), False

        def __len__(self):
            return 90

        def class_counts(self):
            return counts

    def note_of(**options):
        run = replace(finetuned.run, **options)
        return linear_probe.misfit(replace(finetuned, run=run), nn.Linear(4, 3), Images())

    counts = torch.tensor([60, 30, 0])
    assert note_of() == "there is no training image of 1: c"
    counts[2] = 3
    assert not note_of()
    assert note_of(init_head="zero") == "as --run.init-head says"
    monkeypatch.setattr(linear_probe, "MOST_WORK", 90 * 4)
    assert note_of() == "90 images x 4 features x 3 classes would take too long, 3.0 x the limit"
    with pytest.raises(UserError, match=r"its last layer can't be fitted: .* would take"):
        train(changed(finetuned, epochs=0.0))
    train(changed(finetuned, epochs=1.0))
    said = capsys.readouterr().out
    assert "  before training: top-1 " in said
    assert "linear probe: top-1" not in said
    (_, at_zero), *_ = evaluations(finetuned)
    assert at_zero == pytest.approx(0.1, abs=0.1)  # all classes alike


def test_where_a_library_lacks_memory_for_features_a_smaller_batch_is_advised(
    finetuned, monkeypatch
):
    fail = Mock(side_effect=RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"))
    monkeypatch.setattr(features, "predict_features", fail)
    with pytest.raises(FaultError, match=r"memory: give a smaller --data\.batch-size than 16"):
        train(finetuned)


@pytest.mark.parametrize("num_classes", [2, 3])
@pytest.mark.parametrize("has_bias", [True, False])
def test_the_last_layer_is_logistic_regression_on_raw_features(num_classes, has_bias):
    torch.manual_seed(0)
    labels = torch.arange(60) % num_classes
    values = torch.randn(60, 5) + 4 * nn.functional.one_hot(labels, 5)
    values *= torch.tensor([1, 10, 0.1, 1, 0])
    weight, bias, note = fit_classes(values, labels, has_bias, seed=0)
    strength = float(note.removeprefix("C = ").partition(",")[0])
    scaled = StandardScaler(with_mean=has_bias).fit_transform(values.double())
    fitted = LogisticRegression(C=strength, fit_intercept=has_bias, max_iter=1000)
    wanted = fitted.fit(scaled, labels).predict_proba(scaled)
    shares = (values.double() @ weight.T + bias).softmax(1)
    assert torch.allclose(shares, torch.from_numpy(wanted), atol=1e-6)
    assert has_bias or not bias.any()


def test_the_penalty_is_that_of_the_best_answers_to_images_that_were_left_out(monkeypatch):
    monkeypatch.setattr(linear_probe, "STRENGTHS", (1e-4, 0.1, 100.0))  # the last overfits
    torch.manual_seed(3)
    labels = (torch.arange(48) % 3 == 0).long()
    values = torch.randn(48, 10) + 0.5 * labels[:, None]
    folds, shares = StratifiedKFold(5, shuffle=True, random_state=1), {}
    for strength in linear_probe.STRENGTHS:
        model = make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=1000))
        found = cross_val_predict(model, values.double(), labels, cv=folds)
        shares[strength] = (found == labels.numpy()).mean()
    assert shares[0.1] > max(shares[1e-4], shares[100])
    share = f"{shares[0.1]:.2%}"
    note = fit_classes(values, labels, has_bias=True, seed=1).note
    assert note == f"C = 0.1, top-1 {share} in cross-validation"
    note = fit_labels(values, labels[:, None].to(torch.int8), has_bias=True, seed=1).note
    assert note == f"{share} of the labels right in cross-validation"


def test_classes_have_the_penalty_of_the_best_answers_and_labels_that_of_the_lowest_loss(
    monkeypatch,
):
    labels = torch.arange(40) % 2

    def predict(model, *_, **__):  # of a weak penalty more certain, though twice wrong
        shares = np.where(labels == 1, 0.6, 0.4)
        if model[-1].C > 1e-3:
            shares = np.where(labels.roll(1) == 1, 0.05, 0.95)
            shares[:2] = 1 - shares[:2]
        return np.stack((1 - shares, shares), axis=1)

    monkeypatch.setattr("sklearn.model_selection.cross_val_predict", predict)
    values = torch.randn(40, 3)
    assert "C = 0.0001, top-1 100.00%" in fit_classes(values, labels, True, 0).note
    note = fit_labels(values, labels[:, None].to(torch.int8), True, 0).note
    assert note.startswith("95.00% of the labels right")


def test_each_label_has_a_regression_of_its_own_and_what_is_unknown_does_not_count():
    torch.manual_seed(0)
    values = torch.randn(80, 4)
    labels = (values[:, [0, 1, 2]] > 0).to(torch.int8)
    labels[:, 2] = 1  # all images have it
    labels[:20, 0] = -1
    weight, bias, note = fit_labels(values, labels, has_bias=True, seed=0)
    logits = values.double() @ weight.T + bias
    assert ((logits > 0) == (values[:, [0, 1, 2]] > 0))[:, 1].double().mean() > 0.9
    assert not weight[2].any()
    assert bias[2] > 4
    assert "of the labels right in cross-validation" in note
    assert "too few images" in fit_labels(values, labels[:, 2:], has_bias=True, seed=0).note
    labels[:20, 0] = 1  # wrong, where they were unknown
    assert not torch.equal(fit_labels(values, labels, has_bias=True, seed=0).weight[0], weight[0])


def test_two_classes_one_of_a_single_image_are_fitted_without_cross_validation():
    values = torch.randn(11, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0] * 10 + [1])
    assert "cross-validation" not in fit_classes(values, labels, True, 0).note


def test_a_class_of_unreadable_images_leaves_the_last_layer_at_zero(finetuned, monkeypatch):
    def without_a_class(setup, data):
        values, labels = features.features_of(setup, data)
        return features.Features(values, labels.masked_fill(labels == 3, LEFT_OUT), "computed")

    monkeypatch.setattr(linear_probe, "compute_features", without_a_class)
    with pytest.raises(UserError, match="can't be fitted: there is no training image of 1: "):
        train(changed(finetuned, epochs=0.0, optim__ema_decay=0.0))


def test_without_a_cache_features_are_computed_each_time(finetuned, tmp_path, capsys):
    alone = changed(finetuned, epochs=0.0, optim__ema_decay=0.0, run__fresh=True)
    cache = str(tmp_path / "a/new/folder")
    for place, said in ((cache, "computed"), (cache, "read"), ("off", "computed")):
        train(changed(alone, data__cache=place))
        assert f"features, {said} " in capsys.readouterr().out


def test_images_of_more_weight_count_more():
    torch.manual_seed(0)
    values, labels, weights = torch.randn(40, 3), torch.arange(40) % 2, torch.ones(40)
    weights[labels == 1] = 5
    plain, heavy = (fit_classes(values, labels, True, 0, w) for w in (None, weights))
    assert heavy.bias[1] > plain.bias[1] + 0.5


def test_only_images_that_are_known_count_each_with_its_own_weight():
    torch.manual_seed(0)
    values, weights, labels = torch.randn(40, 3), torch.rand(40), torch.arange(40) % 2
    labels[:9] = LEFT_OUT
    found, wanted = nn.Linear(3, 2), nn.Linear(3, 2)
    linear_probe.fit_layer(found, features.Features(values, labels, ""), weights, 0)
    linear_probe.fit_layer(wanted, features.Features(values[9:], labels[9:], ""), weights[9:], 0)
    torch.testing.assert_close(found.weight, wanted.weight)
    linear_probe.fit_layer(wanted, features.Features(values, labels, ""), None, 0)
    assert not torch.allclose(found.weight, wanted.weight, rtol=0.01)
    several = torch.stack((labels, torch.arange(40) // 20), dim=1).to(torch.int8)
    all_known = fit_labels(values[9:], several[9:], True, 0, weights[9:])
    some = fit_labels(values, several, True, 0, weights)
    torch.testing.assert_close(some.weight[0], all_known.weight[0])


def test_the_logits_of_a_network_are_what_was_fitted_whatever_it_multiplies_them_by(config):
    torch.manual_seed(0)
    model = build_model(SMALL, 3, 32).eval()
    nn.init.normal_(model.head.weight)
    fitted, images = [], torch.rand(4, 3, 32, 32)
    hook = model.head.register_forward_hook(lambda *call: fitted.append(call[2]))
    model(images)
    hook.remove()
    assert linear_probe.rescale(model, model.head, config)
    torch.testing.assert_close(model(images), fitted[0])


def test_a_network_that_computes_on_after_its_last_layer_begins_at_zero(config, monkeypatch):
    model, labels = build_model(SMALL, 2, 32), torch.arange(20) % 2
    found = features.Features(torch.randn(20, model.head.in_features), labels, "computed")
    monkeypatch.setattr(linear_probe, "compute_features", lambda *_: found)
    monkeypatch.setattr(linear_probe, "rescale", lambda *_: False)
    images = Mock(source=Source(labels, ("ant", "bee"), reader=len), weights=None)
    setup = SimpleNamespace(config=config, world=ALONE, model=model, train_data=images)
    note, is_fitted = linear_probe.fit_head(setup)
    assert note == "the last layer begins at zero: the network computes on after it"
    assert not is_fitted
    assert not model.head.weight.any()


def test_a_last_layer_whose_outputs_the_network_bends_stays_as_it_is(config):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 3), nn.Softplus())
    before = model[1].weight.clone()
    assert not linear_probe.rescale(model, model[1], config)
    assert torch.equal(model[1].weight, before)


def test_an_image_is_left_out_only_if_none_of_its_labels_is_known():
    several = torch.tensor([[1, LEFT_OUT], [LEFT_OUT, LEFT_OUT], [0, 0]])
    assert features.left_out(several).tolist() == [False, True, False]
    assert features.left_out(torch.tensor([2, LEFT_OUT])).tolist() == [False, True]


def test_all_layers_begin_to_learn_with_a_softer_probe_of_the_same_answers():
    torch.manual_seed(0)
    model = build_model(SMALL, 3, 32).eval()
    nn.init.normal_(model.head.weight)
    images = torch.rand(4, 3, 32, 32)
    logits = model(images)
    linear_probe.soften_head(model)
    torch.testing.assert_close(model(images), 0.2 * logits)


def test_features_of_files_that_have_changed_are_computed_anew(
    finetuned, on_photos, photos, tmp_path, capsys
):
    root = shutil.copytree(photos, tmp_path / "photos")
    images = replace(on_photos.data, root=str(root), limit=0, cache=str(tmp_path / "cache"))
    config = changed(finetuned, epochs=0.0, optim__ema_decay=0.0, run__fresh=True)
    config = replace(config, data=images)
    changed_file = root / "train" / "ant" / "2.jpg"
    for time, said in ((1, "computed"), (1, "read"), (2, "computed")):
        os.utime(changed_file, (time, time))  # as one of the same size, written later
        train(config)
        assert f"features, {said} " in capsys.readouterr().out


@needs_fork
def test_features_of_what_no_digest_knows_are_not_kept(finetuned, monkeypatch, tmp_path, capsys):
    def mine(data, split):
        pixels = shapes(data, split).thinned(64).pixels
        labels = torch.arange(64) % 2
        return Source(labels, ("a", "b"), reader=lambda index: pixels[index])

    monkeypatch.setitem(DATASETS, "mine", mine)
    config = changed(finetuned, epochs=0.0, optim__ema_decay=0.0, run__fresh=True)
    config = changed(config, data__name="mine", data__cache=str(tmp_path / "cache"))
    for _ in range(2):
        train(config)
        assert "features, computed " in capsys.readouterr().out


def test_features_are_known_by_all_that_they_depend_on_and_by_nothing_else(config):
    def digest_of(split="train", mean=(0.5, 0.5, 0.5), **knobs):
        own = changed(config, **knobs)
        source = replace(shapes(own.data, split), mean=mean)
        return features.digest(own, SimpleNamespace(source=source), model)

    torch.manual_seed(0)
    model = build_model(SMALL, 3, 32)
    known = digest_of()
    found = {known, digest_of(data__image_size=48), digest_of("val")}
    found |= {digest_of(mean=(0.4, 0.5, 0.5)), digest_of(augment__tta="flip")}
    found |= {digest_of(precision="bf16")}
    with torch.no_grad():
        model.head.weight.add_(1)
        assert digest_of(seed=9, optim__lr=9.0, run__dir="other") == known
        next(model.parameters()).add_(1)
    assert len(found | {digest_of()}) == 7


def test_features_are_not_kept_while_an_image_cannot_be_read(config, monkeypatch, tmp_path):
    found = torch.zeros(4, 3), torch.tensor([0, LEFT_OUT, 1, 0])
    compute = Mock(return_value=found)
    monkeypatch.setattr(features, "features_of", compute)
    config = changed(config, data__cache=str(tmp_path / "kept"))
    setup = SimpleNamespace(config=config, model=build_model(SMALL, 2, 32), world=ALONE)
    for _ in range(2):
        features.compute_features(setup, SimpleNamespace(source=shapes(config.data, "train")))
    assert compute.call_count == 2


def test_a_cache_keeps_the_newest_features(tmp_path, monkeypatch):
    monkeypatch.setattr(features, "MOST_FILES", 2)
    for time, name in enumerate(("features-c.pt", "features-a.pt", "features-b.pt", "images")):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time, time))
    features.forget_oldest(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "features-a.pt",
        "features-b.pt",
        "images",
    }


def test_features_are_on_the_device_once(config, monkeypatch):
    given = []
    alive = []

    def predict(_model, images, *_):
        alive.append(sum(one() is not None for one in given))
        values = images.float().flatten(1)[:, :5].clone()
        given.append(weakref.ref(values))
        return None, values

    monkeypatch.setattr(features, "predict_features", predict)
    data = EvalData(config.data, "val", ALONE, batch_size=7)
    setup = SimpleNamespace(world=ALONE, model=None, normalize=None, precision=None)
    values, labels = features.features_of(setup, data)
    assert len(alive) > 2
    assert max(alive) == 1  # that of the batch before
    images = torch.cat([batch.images for batch in data.batches()])
    assert torch.equal(values, images.float().flatten(1)[:, :5])
    assert torch.equal(labels, data.labels)


@pytest.mark.parametrize("workers", [0, 2])
def test_features_of_a_stream_have_the_labels_of_their_images(workers, finetuned, photos):
    config = changed(finetuned, data__name="folder", data__root=str(photos), data__limit=0)
    config = changed(config, data__batch_size=2, data__cache="off", epochs=0.0)  # many batches
    config = changed(config, data__where="host")
    run = f"{config.run.dir}-stream"
    streamed = changed(config, data__where="stream", data__workers=workers, run__dir=run)
    train(config)
    train(streamed)
    assert_same(best_of(config).weights, best_of(streamed).weights)
