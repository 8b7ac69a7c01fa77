"""One label or several: the loss, the metrics and what decides are those of the task."""

import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import answers_of, changed, logged, mixed, run_ranks, train_until
from safetensors import safe_open
from sklearn import metrics as sklearn
from test_resume import assert_same, final, rows
from torch import nn
from torch.nn.functional import one_hot
from torch.testing import assert_close

from image_classifier.checkpoints import LoadedModel
from image_classifier.checkpoints.reading import read_checkpoint
from image_classifier.checkpoints.state import TrainState
from image_classifier.config import (
    Config,
    DataConfig,
    OptimConfig,
)
from image_classifier.data import (
    LEFT_OUT,
    Augmented,
    EvalData,
    Source,
)
from image_classifier.data.datasets import DATASETS
from image_classifier.data.datasets.shapes import shapes
from image_classifier.data.decode import BadImageError
from image_classifier.errors import UserError
from image_classifier.evaluate import (
    Scores,
    evaluate,
    metric_names,
)
from image_classifier.metrics.table import (
    METRICS,
    Metric,
    better,
    metric_text,
)
from image_classifier.precision import Precision
from image_classifier.preprocess import Normalize
from image_classifier.runtime.distributed import World, join_world
from image_classifier.tasks import (
    TASKS,
    label_loss,
)
from image_classifier.tracking import checks
from image_classifier.train import train

COUNT, CLASSES, UNREADABLE = 23, 7, 4


def read(index):
    """An image of noise; one cannot be read."""
    if index == UNREADABLE:
        raise BadImageError("4.png", "planted")
    generator = torch.Generator().manual_seed(index)
    return torch.randint(0, 256, (32, 32, 3), dtype=torch.uint8, generator=generator)


def of_one_label(*_):
    """Images of one class each; the last class has none."""
    classes = tuple(map(str, range(CLASSES)))
    return Source(torch.arange(COUNT) * 5 % (CLASSES - 1), classes, reader=read)


def of_several(*_):
    """Images with any number of labels, some unknown, of one all; no image has the last."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(-1, 2, (COUNT, CLASSES), dtype=torch.int8, generator=generator)
    labels[:, -1], labels[9] = labels[:, -1].clamp(max=0), LEFT_OUT
    return replace(of_one_label(), labels=labels)


def evaluated():
    """The scores and the metrics of both tasks, of a network with random weights."""
    with join_world(Config().compute) as world:
        return [evaluated_on(task, world) for task in TASKS]


def evaluated_on(task, world):
    """Scores, and all metrics."""
    DATASETS["noise"] = of_several if task == "multi-label" else of_one_label
    config = Config(data=DataConfig(name="noise"))
    data = EvalData(config.data, "val", world, batch_size=3, task=task)
    data.note = lambda *_: None  # as with `data.on_bad_image` skip
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32**2, CLASSES))
    precision = Precision("fp32", config.compute, config.optim, world.device)
    scores = evaluate(model, data, Normalize(data.source, 32, precision), precision)
    return scores, scores.metrics(*scores.names)


def by_sklearn(found):
    """The metrics of gathered probabilities."""
    labels, shares = found.predictions.source.labels.numpy(), found.predictions.probabilities
    kept = np.arange(COUNT) != UNREADABLE
    labels, shares, guesses = labels[kept], shares.numpy()[kept], shares.numpy()[kept].argmax(1)
    if found.predictions.source.task == "single-label":
        table, present = one_hot(torch.tensor(labels), CLASSES).numpy(), range(CLASSES - 1)
        own, every = [*present], range(CLASSES)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a class without images is predicted
            balanced = sklearn.balanced_accuracy_score(labels, guesses)
        return {
            "loss": sklearn.log_loss(labels, shares, labels=every),
            "top1": sklearn.accuracy_score(labels, guesses),
            "top5": sklearn.top_k_accuracy_score(labels, shares, k=5, labels=every),
            "balanced_accuracy": balanced,
            "macro_f1": sklearn.f1_score(labels, guesses, labels=own, average="macro"),
            "auroc": sklearn.roc_auc_score(table[:, own], shares[:, own]),
            "average_precision": sklearn.average_precision_score(table[:, own], shares[:, own]),
            "brier": np.square(shares - table).sum(1).mean(),
        }
    known, right, yes = labels >= 0, (shares >= 0.5) == labels, shares >= 0.5
    own = [n for n in range(CLASSES) if (labels[:, n] == 1).any()]

    def mean(score, guesses):
        pairs = ((labels[known[:, n], n], guesses[known[:, n], n]) for n in own)
        return np.mean([score(*pair) for pair in pairs])

    return {
        "loss": sklearn.log_loss(labels[known], shares[known]),
        "exact": np.mean([right[n][known[n]].all() for n in range(COUNT - 1) if known[n].any()]),
        "micro_f1": sklearn.f1_score(labels[known], yes[known]),
        "macro_f1": mean(sklearn.f1_score, yes),
        "auroc": mean(sklearn.roc_auc_score, shares),
        "average_precision": mean(sklearn.average_precision_score, shares),
        "brier": sklearn.brier_score_loss(labels[known], shares[known]),
    }


def test_metrics_are_those_of_scikit_learn_on_any_number_of_ranks():
    alone = evaluated()
    for scores, metrics in alone:
        expected = {f"val/{name}": value for name, value in by_sklearn(scores).items()}
        expected |= {"val/bad_images": 1, "val/ece": metrics["val/ece"]}
        expected["val/classes"] = CLASSES - 1  # that have images
        assert metrics == pytest.approx(expected)
    for rank in run_ranks(2, evaluated) + run_ranks(3, evaluated):
        for (scores, metrics), (one, expected) in zip(rank, alone, strict=True):
            assert_close(scores.predictions.probabilities, one.predictions.probabilities)
            assert metrics == pytest.approx(expected)


def test_the_loss_of_several_labels_ignores_unknown_ones_and_its_parts_add_up():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 4, generator=generator).requires_grad_()
    labels = torch.randint(-1, 2, (6, 4), dtype=torch.int8, generator=generator)
    labels[2] = LEFT_OUT
    weights = torch.rand(6, generator=generator)
    loss_of = label_loss(OptimConfig(label_smoothing=0.1), 6)
    batch = Augmented(None, labels, weights)
    parts = ((0, 4), (4, 6))
    found = sum(loss_of(logits[start:stop], batch.part(start, stop)) for start, stop in parts)
    assert_close(found, loss_of(logits, batch))
    found.backward()
    assert torch.equal(logits.grad != 0, labels >= 0)
    # For one label, of which half of what is smoothed goes to either answer.
    logit = torch.tensor([[1.5]])
    batches = [Augmented(None, torch.tensor([[label]])) for label in (1, 0)]
    share = logit.sigmoid().item()
    plain = np.array([-np.log(share), -np.log(1 - share)])
    for smoothing in (0.0, 0.2):
        loss_of = label_loss(OptimConfig(label_smoothing=smoothing), 1)
        found = [loss_of(logit, batch).item() for batch in batches]
        expected = (1 - smoothing) * plain + smoothing * plain.mean()
        assert found == pytest.approx(expected, rel=1e-5)


def marks(data, split):  # noqa: ARG001 - it has no knobs
    """Images on which marks of four kinds are, in any combination; some labels are unknown."""
    generator = torch.Generator().manual_seed(len(split))
    count = 480 if split == "train" else 161
    labels = torch.randint(0, 2, (count, 4), dtype=torch.int8, generator=generator)
    pixels = torch.randint(0, 90, (count, 32, 32, 3), dtype=torch.uint8, generator=generator)
    corners = torch.randint(0, 24, (count, 4, 2), generator=generator).tolist()
    for image, own, places in zip(pixels, labels.tolist(), corners, strict=True):
        for kind, (top, left) in enumerate(places):
            if own[kind]:
                height, width = ((8, 8), (8, 3), (3, 8), (6, 6))[kind]
                channels = slice(None) if kind == 3 else kind  # the last is white
                image[top : top + height, left : left + width, channels] = 250
    hidden = torch.rand(labels.shape, generator=generator) < 0.1
    classes = ("square", "bar", "beam", "tile")
    return Source(labels.masked_fill(hidden, LEFT_OUT), classes, pixels)


def train_on_marks(config, last_step=None):
    """Train on them, until a step after which this process is killed."""
    DATASETS["marks"] = marks
    return train(config).metrics() if last_step is None else train_until(config, last_step)


def test_several_labels_are_learned_and_a_killed_run_ends_as_an_unbroken_one(config, tmp_path):
    config = changed(config, data__name="marks", data__limit=0, data__batch_size=96, epochs=3)
    config = changed(config, model__task="multi-label", model__name="resnet9", **mixed(mixup=0.2))
    unbroken = changed(config, optim__lr=0.4, run__dir=str(tmp_path / "unbroken"))
    (metrics, _), config = run_ranks(2, train_on_marks, unbroken), changed(config, optim__lr=0.4)
    assert metrics["val/average_precision"] > 0.85
    with suppress(EOFError):
        run_ranks(2, train_on_marks, config, 8)
    assert run_ranks(2, train_on_marks, config)[0] == metrics
    assert_same(final(config), final(unbroken))
    assert rows(config) == rows(unbroken)
    assert rows(config)[-1]["val/exact"] == metrics["val/exact"]
    with safe_open(Path(config.run.dir, "predictions.safetensors"), "pt") as file:
        assert file.get_tensor("probabilities").shape == (161, 4)


def test_one_label_in_each_row_is_for_either_task():
    pixels, table = torch.zeros(3, 8, 8, 3, dtype=torch.uint8), [[0, 1], [1, 0], [0, 1]]
    source = Source(torch.tensor(table, dtype=torch.int8), ("ant", "bee"), pixels=pixels)
    single = source.fitted("single-label", "train")
    assert (single.labels.dtype, single.labels.tolist()) == (torch.int64, [1, 0, 1])
    again = single.fitted("multi-label", "train")
    assert again.labels.tolist() == table
    assert again.notes[0].startswith("train: no image has several labels")
    for row in ([1, 1], [0, 0], [1, -1]):
        labels = torch.tensor([table[0], row, table[1]], dtype=torch.int8)
        with pytest.raises(UserError, match=r"1 of 3 images have not exactly one label, .*image 1"):
            replace(source, labels=labels).fitted("single-label", "train")


@pytest.mark.parametrize("labels", [torch.eye(2, dtype=torch.int8)[[0, 1, 1]], [0, 1, 1]])
def test_a_model_knows_the_classes_of_other_images_by_their_names(labels, monkeypatch):
    pixels = torch.zeros(3, 8, 8, 3, dtype=torch.uint8)
    source = Source(torch.as_tensor(labels), ("cat", "ant"), pixels=pixels)
    monkeypatch.setitem(DATASETS, "own", lambda *_: source)
    classes = ("ant", "bee", "cat")
    found = EvalData(DataConfig("own"), "val", World(torch.device("cpu")), classes=classes)
    assert (found.source.classes, found.labels.tolist()) == (classes, [2, 0, 0])
    # As `export` and others ask a trained model.
    model = SimpleNamespace(classes=classes, config=Config(), path="")
    assert LoadedModel.check_images(model, source, "val").labels.tolist() == [2, 0, 0]


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"model__task": "single-label"}, "not exactly one label, such as 'image 0' .* multi-la"),
        ({"run__best_by": "top1"}, "--run.best-by 'top1' is none of: auto, exact, loss, micro_f1"),
    ],
)
def test_what_the_task_has_not_is_refused_before_training(config, monkeypatch, knobs, words):
    monkeypatch.setitem(DATASETS, "marks", marks)
    config = changed(config, data__name="marks", model__task="multi-label")
    with pytest.raises(UserError, match=words):
        train(changed(config, **knobs))
    assert not Path(config.run.dir, "checkpoints").exists()


def mine(lower_is_better):
    """A metric with a number of NumPy's."""
    return Metric(lambda found: found.probability.numpy().mean(), lower_is_better=lower_is_better)


@pytest.mark.parametrize(("lower_is_better", "best"), [(True, 0.25), (False, 0.75)])
def test_a_metric_of_ones_own_says_which_way_is_better(lower_is_better, best, monkeypatch):
    monkeypatch.setitem(METRICS, "rmse", mine(lower_is_better))
    state = TrainState(*[None] * 3, best_by="rmse")
    for state.step, score in enumerate((float("nan"), 0.5, best, 0.5, 0.5)):
        state.record(score)
    assert (state.best_step, state.best_score) == (2, best)
    assert state.early_stop(2).startswith("stopped early: no evaluation of 2 was better")
    assert state.best_text.endswith(f", rmse {best}00")


def test_the_latest_weights_within_an_image_of_the_best_are_kept():
    state = TrainState(*[None] * 3)
    kept = []
    for state.step, right in enumerate((35, 37, 36, 35, 36, 34)):
        state.record(right / 50, slack=1.001 / 50)
        kept.append(state.best_step)
    assert kept == [0, 1, 2, 2, 4, 4]  # not an image further with each
    assert (state.best_score, state.num_worse) == (37 / 50, 4)
    state = TrainState(*[None] * 3, best_by="ece")  # lower is better
    for state.step, error in enumerate((0.3, 0.1, 0.12, 0.13)):
        state.record(error, slack=0.025)
    assert (state.best_step, state.best_score) == (2, 0.1)


def test_an_image_is_so_much_of_a_share_and_nothing_of_a_loss():
    predictions = answers_of(("ant", "bee"), torch.tensor([[30, 10], [5, 5]]))
    predictions.predicted[:10] = LEFT_OUT
    scores = Scores(predictions, {"top1": 0.5, "loss": 0.1})
    assert 1 / 40 < scores.slack("top1") < 1.1 / 40
    assert scores.slack("loss") == 0


@pytest.mark.parametrize("task", TASKS)
def test_right_answers_are_better_than_wrong_ones_by_every_metric(task):
    table = torch.eye(2, dtype=torch.int8).repeat(3, 1)
    source = Source(table, ("ant", "bee"), reader=read).fitted(task, "val")
    functions = TASKS[task]

    def scores_of(logits):
        found = functions.results(logits, source.labels)
        shares = functions.probabilities(logits)
        return Scores(functions.predictions(source, found, shares), {})

    right, wrong = (scores_of(sign * (2.0 * table - 1)) for sign in (1, -1))
    for name in metric_names(source):
        if METRICS[name].function:  # an evaluation counts the others
            assert better(name) * (right.value(name) - wrong.value(name)) > 0


@pytest.mark.parametrize("knobs", [{}, {"is_percent": True}])
def test_a_metric_that_does_not_say_which_way_is_better_is_none(knobs):
    with pytest.raises(TypeError, match="lower_is_better"):
        Metric(len, **knobs)


def test_a_metric_that_is_no_share_is_no_percentage(monkeypatch):
    monkeypatch.setitem(METRICS, "kappa", Metric(len, lower_is_better=False))
    assert metric_text("kappa", -0.005) == "kappa -0.0050"
    assert metric_text("top1", 0.995) == "top-1 99.50%"


def test_a_metric_of_ones_own_decides_and_its_number_can_be_saved(config, monkeypatch):
    monkeypatch.setitem(METRICS, "mine", mine(lower_is_better=True))
    train(changed(config, run__best_by="mine", epochs=1))
    best = read_checkpoint(Path(config.run.dir, "checkpoints", "best.pt"))["state"]["best_score"]
    assert logged(config.run.dir)[-1]["val/mine"] == best


def test_a_metric_that_is_defined_for_no_class_can_not_decide(config, monkeypatch):
    def one_class(*_):
        return replace(marks(*_), labels=torch.zeros(480, dtype=torch.int64))

    monkeypatch.setitem(DATASETS, "marks", lambda data, _: one_class(data, "train"))
    config = changed(config, data__name="marks", run__best_by="auroc")
    with pytest.raises(UserError, match=r"--run.best-by auroc: no class has validation images"):
        train(config)


def test_a_metric_of_each_class_alone_makes_a_table_of_all_labels(config, monkeypatch):
    table = Mock(side_effect=AssertionError("gigabytes, of many images and classes"))
    monkeypatch.setattr(checks, "one_hot", table)
    checks.check_best_by("top1", shapes(config.data, "val"))
    with pytest.raises(AssertionError):
        checks.check_best_by("auroc", shapes(config.data, "val"))


def test_the_best_by_loss_is_the_lowest_and_old_checkpoints_count(finished, tmp_path):
    config = changed(finished, epochs=3, run__best_by="loss", run__dir=str(tmp_path / "by-loss"))
    train(config)
    found = [row for row in logged(config.run.dir) if "val/loss" in row]
    saved = read_checkpoint(Path(config.run.dir, "checkpoints", "best.pt"))["state"]
    best = min(found, key=lambda row: row["val/loss"])
    assert (saved["best_score"], saved["step"]) == (best["val/loss"], best["step"])
    with pytest.raises(UserError, match=r"--run.best-by was loss, is top1"):
        train(changed(config, run__best_by="auto"))
    train(changed(finished, run__best_by="top1"))  # as auto is
    # A run of an earlier version.
    last = Path(finished.run.dir, "checkpoints", "last.pt")
    saved = read_checkpoint(last)
    score = saved["state"].pop("best_score")
    torch.save(saved | {"state": saved["state"] | {"best_top1": score}}, last)
    assert read_checkpoint(last)["state"]["best_score"] == score
    train(finished)
