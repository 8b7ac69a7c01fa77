"""What a run measures: scores of every image on any ranks, its speed; who receives it."""

import json
import resource
from copy import deepcopy
from math import nan
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
import torch
from conftest import (
    answers_of,
    changed,
    logged,
    run_ranks,
    untrained_run,
)
from test_datasets import CLASSES, LABELS
from test_resume import assert_same
from torch import nn
from torch.testing import assert_close

from image_classifier import evaluate as evaluation
from image_classifier import train as train_module
from image_classifier.checkpoints import load_best
from image_classifier.data.datasets.source import Source
from image_classifier.data.loader import EvalData
from image_classifier.errors import UserError
from image_classifier.evaluate import (
    Scores,
    evaluate,
    metric_names,
    predict_features,
)
from image_classifier.extensions import finding
from image_classifier.metrics import NO_DECISION, predictions
from image_classifier.metrics.table import METRICS, Metric, phrase
from image_classifier.models import build_model
from image_classifier.models.resnet9 import ResNet9
from image_classifier.precision import Precision
from image_classifier.preprocess import Normalize
from image_classifier.runtime.distributed import World, join_world
from image_classifier.tracking import Observer, logger, trackers
from image_classifier.train import train

CPU = World(torch.device("cpu"))
SIZES = (1, 2, 3, 7, 23)


def evaluated(config, model, world):
    """The scores of a model on the validation images."""
    precision = Precision("fp32", config.compute, config.optim, world.device)
    data = EvalData(config.data, "val", world)
    return evaluate(model, data, Normalize(data.source, 32, precision), precision)


def evaluated_on_sets(config):
    """The scores of an untrained model on sets of several sizes."""
    with join_world(config.compute) as world:
        torch.manual_seed(world.rank)  # ranks differ in their statistics, as in training
        model = build_model(config.model, 10, 32)
        for buffer in filter(torch.is_floating_point, model.buffers()):
            buffer.uniform_(0.5, 1.5)
        torch.manual_seed(0)
        for weight in model.parameters():
            nn.init.normal_(weight, std=0.1)
        return [evaluated(changed(config, data__limit=size), model, world) for size in SIZES]


def test_every_image_counts_once_on_any_number_of_ranks(config):
    config = changed(config, model__name="resnet9", data__workers=0)
    alone = evaluated_on_sets(config)  # of images in memory
    streamed = changed(config, data__where="stream")
    answers = attrgetter("predicted", "probability", "target_probability")
    for rank in run_ranks(3, evaluated_on_sets, config) + run_ranks(2, evaluated_on_sets, streamed):
        for size, one, other in zip(SIZES, alone, rank, strict=True):
            assert int(other.predictions.class_counts().sum()) == size
            assert other.known == pytest.approx(one.known, rel=1e-6)
            assert_close(answers(other.predictions), answers(one.predictions), rtol=1e-5, atol=1e-6)


def test_mistakes_are_counted_by_pair_and_unreadable_images_are_none():
    predicted, labels = torch.tensor([[-1, 1, 0, 2, 0, 1], [0, 0, 1, 1, 1, 1]]).int()
    found = predictions.mistakes_of(predicted, labels, 100_000)
    assert found.tolist() == [[1, 0, 2], [0, 1, 1], [1, 2, 1]]
    large = torch.tensor([99_999], dtype=torch.int32)
    assert predictions.mistakes_of(large - 1, large, 100_000).tolist() == [[99_999, 99_998, 1]]
    assert predictions.mistakes_of(large, large, 100_000).shape == (0, 3)


def test_scores_are_those_of_the_logits_and_the_model_is_left_as_it_was(config):
    config = changed(config, model__name="resnet9", model__dropout=0.5, data__limit=40)
    model = build_model(config.model, 10, 32)
    before = deepcopy(model.state_dict())
    scores = evaluated(config, model, CPU)
    assert_same(model.state_dict(), before)  # BatchNorm's statistics too
    assert model.training
    found, source = scores.predictions, scores.predictions.source
    images = (source.pixels / 255 - torch.tensor(source.mean)) / torch.tensor(source.std)
    with torch.no_grad():
        logits = model.eval()(images.permute(0, 3, 1, 2))
    labels, ranked = source.labels, logits.argsort(dim=1, descending=True)
    shares = [(ranked == labels[:, None])[:, :k].any(1).float().mean().item() for k in (1, 5)]
    loss = nn.functional.cross_entropy(logits, labels).item()
    assert scores.known == pytest.approx({"loss": loss, "top1": shares[0], "top5": shares[1]})
    assert int(predictions.confusion_of(found.predicted, labels, 10)[labels[0], ranked[0, 0]]) >= 1
    sure = logits.softmax(1)
    assert torch.equal(found.predicted, ranked[:, 0])
    assert_close(found.probability, sure.max(1).values)
    assert_close(found.target_probability, sure[range(40), labels])
    error = predictions.calibration_error(predictions.calibrate(found))
    assert scores.metrics()["val/ece"] == error


def test_without_a_tool_that_reads_it_the_decision_of_a_checkpoint_does_not_count(
    config, photos, monkeypatch
):
    run = untrained_run(config, photos, temperature=1.5, thresholds=(0.9,))
    monkeypatch.setattr(finding, "find_tools", lambda _: {})
    decision = load_best(Path(run, "checkpoints", "best.pt")).decision
    assert decision == NO_DECISION
    shares = torch.tensor([[0.45, 0.55], [0.3, 0.7]])
    assert decision.is_sure(shares).all()
    assert decision.has_label(shares).tolist() == [[False, True], [False, True]]


def test_classes_are_listed_from_the_worst_and_top5_of_more_than_five(monkeypatch):
    monkeypatch.setattr(evaluation, "MOST_KEPT", 0)
    for num_classes, is_told in ((5, False), (6, True)):
        answers = answers_of(tuple("abcdef"[:num_classes]), torch.eye(num_classes).long())
        assert ("top5" in metric_names(answers.source)) == is_told
    confusion = torch.tensor([[2, 1, 0], [0, 0, 1], [0, 0, 0]])
    answers = answers_of(("ant", "bee", "cat"), confusion)
    text = Scores(answers, {"loss": 0.5, "top1": 0.75}).text("top1")
    # Nothing is known of cats.
    assert text.splitlines()[1:] == [
        "  bee   0.00%",
        "  ant  66.67%",
        "balanced accuracy 33.33% over the 2 classes with images, "
        "macro F1 40.00% over the 2 classes with images, ECE 25.00%",
        "top-1 75.00%, loss 0.5000",
    ]
    rare = answers_of(("common", "rare"), torch.tensor([[9, 0], [0, 0]]))
    scores = Scores(rare, {"loss": 0.5, "top1": 1.0})
    one = "balanced accuracy 100.00% over the 1 class with images"
    assert one in scores.text("top1")
    assert phrase(scores.metrics("balanced_accuracy"), "balanced_accuracy").startswith(one)


def test_a_loss_that_is_not_finite_is_told():
    found = phrase({"val/top1": 0.5, "val/ece": 0.0})
    assert found == "top-1 50.00%, and a loss that is not finite"


def test_scores_are_shown_in_a_line():
    scores = Scores(answers_of(("ant", "bee"), 4000 * torch.eye(2).long()), {"top1": 1.0})
    shown = "<Predictions: 8,000 images of 2 classes>"
    assert (repr(scores), repr(scores.predictions)) == (f"<Scores: top-1 100.00%; {shown}>", shown)


def test_the_result_of_a_run_is_that_of_the_weights_that_it_leaves(config, monkeypatch, capsys):
    values = iter((0.9, 0.1, 0.9))
    monkeypatch.setitem(METRICS, "mine", Metric(lambda _: next(values), lower_is_better=False))
    config, folder = changed(config, run__best_by="mine"), Path(config.run.dir)
    scores = train(config)
    first, last = (row["val/loss"] for row in logged(folder) if "val/loss" in row)
    assert scores.value("loss") == first != last
    said = capsys.readouterr().out.splitlines()
    assert any(f"loss {first:.4f}" in line for line in said[-4:-2])  # a tool says more after it
    assert (
        said[-2] == "best.pt has the weights of step 4, the latest with the best score, mine 0.9000"
    )
    result = json.loads((folder / "status.json").read_text())["result"]
    assert (result["step"], result["val/loss"], result["val/mine"]) == (4, first, 0.9)
    written = (folder / "predictions.safetensors").read_bytes()
    (folder / "predictions.safetensors").unlink()
    assert train(config).value("loss") == first  # best.pt is evaluated again
    assert (folder / "predictions.safetensors").read_bytes() == written


def test_the_first_step_is_not_in_the_speed_as_it_compiles(config, monkeypatch, capsys):
    forward, seconds = ResNet9.forward, [0.0]

    def forward_slowly_at_first(model, images):
        seconds[0] += 2 if seconds[0] else 100
        return forward(model, images)

    monkeypatch.setattr(ResNet9, "forward", forward_slowly_at_first)
    monkeypatch.setattr(logger.time, "monotonic", lambda: seconds[0])
    train(changed(config, epochs=1, run__log_every_steps=1))
    first, row, *_ = logged(config.run.dir)
    assert "train/images_per_second" not in first
    assert row["train/images_per_second"] == 8  # a step in two seconds, of 16 images
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert most / 2 < row["memory_bytes"] <= most
    said = capsys.readouterr().out
    for words in (" 1 process, ", ", fp32; as --precision says; seed 0: ", "  ETA 0:00\n"):
        assert words in said


def test_a_tracker_is_told_no_paths_and_if_it_fails_others_go_on(config, tmp_path, monkeypatch):
    sound, failing = Mock(), Mock(side_effect=[0, RuntimeError("no space\x1b[2J left\nand more")])
    opened_with = Mock(return_value=trackers.Tracker(sound))
    table = {
        "usual": SimpleNamespace(open_tracker=opened_with, IS_DEFAULT=True),
        "failing": SimpleNamespace(open_tracker=lambda *_: trackers.Tracker(failing)),
        "unreachable": SimpleNamespace(open_tracker=Mock(side_effect=OSError("no network"))),
    }
    monkeypatch.setattr(trackers, "find_tools", lambda _: table)
    said, names = [], ("unreachable", "failing", "auto", "usual")
    config = changed(config, data__root="/planted", run__init_from="planted", run__trackers=names)
    opened = trackers.Trackers(said.append)
    opened.begin(config, tmp_path, 0)
    for step in (1, 2, 3):
        opened.tell("log", step, {})
    opened.tell("close", True)
    assert sound.mock_calls == [call(1, {}), call(2, {}), call(3, {})]
    assert failing.mock_calls == [call(1, {}), call(2, {})]
    end = "metrics.jsonl has all metrics"
    assert said == [
        f"unreachable failed, training continues: no network; {end}",
        f"failing failed, training continues: no space\\x1b[2J left; {end}",
    ]
    _, knobs, _ = opened_with.call_args.args
    assert "planted" not in str(knobs)
    assert (knobs["optim.lr"], knobs["compute.compile"]) == (0.02, False)


def test_a_metric_of_a_tool_does_not_replace_that_of_the_run(config, monkeypatch):
    for own, said in (({"val/auroc": 0.1}, "metric val/auroc"), ({"step": 1}, "metric step")):
        observer = Observer(judge=lambda _, own=own: own)
        monkeypatch.setattr(train_module, "open_observers", lambda _, one=observer: [one])
        with pytest.raises(UserError, match=f"a tool adds the {said}, which is there: rename it"):
            train(changed(config, run__fresh=True))
        assert not any("val/loss" in row for row in logged(config.run.dir))  # the first one says it


def test_a_metric_that_is_no_number_is_said_to_choose_nothing(config, monkeypatch, capsys):
    monkeypatch.setitem(METRICS, "mine", Metric(lambda _: nan, lower_is_better=True))
    train(changed(config, epochs=1, run__best_by="mine"))
    said = capsys.readouterr().out
    assert "warning: --run.best-by mine is no number: it chooses no best weights" in said


def test_a_tracker_without_its_library_is_refused(monkeypatch, tmp_path):
    tool = SimpleNamespace(open_tracker=None, LIBRARY="no_such_library")
    monkeypatch.setattr(trackers, "find_tools", lambda module: {f"my-{module}": tool})
    (tmp_path / tool.LIBRARY).mkdir()  # such as that in which wandb keeps its runs
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"my-tracker needs a library: .* no_such_library$"):
        trackers.chosen_trackers(["auto", "my-tracker"])
    tool.LIBRARY = "torch no_such_library"
    with pytest.raises(UserError, match=r" torch no_such_library$"):
        trackers.chosen_trackers(["my-tracker"])


def test_features_are_averaged_over_views_as_logits_are(config):
    source = Source(LABELS, CLASSES, torch.randint(256, (6, 8, 8, 3)).byte())
    model = nn.Sequential(nn.Flatten(), nn.Linear(8 * 8 * 3, 2)).eval()
    precision = Precision("fp32", config.compute, config.optim, CPU.device)
    normalize = Normalize(source, 8, precision, "shift")
    logits, features = predict_features(
        model, source.pixels.permute(0, 3, 1, 2), normalize, precision
    )
    with torch.no_grad():
        torch.testing.assert_close(model[1](features), logits)
