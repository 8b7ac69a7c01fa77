"""Evaluation counts every image once, on any number of processes, and changes nothing."""

import pytest
import torch
from conftest import answers_of, changed, run_ranks
from torch import nn

from image_classifier.data.loader import EvalData
from image_classifier.evaluate import Scores, evaluate
from image_classifier.models import build_model
from image_classifier.precision import Precision
from image_classifier.predictions import (
    calibrate,
    calibration_error,
    scores_text,
)
from image_classifier.preprocess import Normalize
from image_classifier.runtime.distributed import World, join_world

SIZES = (1, 2, 3, 7, 23)


def evaluated(config, model, world):
    """The scores of a model on the validation images."""
    precision = Precision("fp32", config.compute, config.optim, world.device)
    data = EvalData(config.data, "val", world)
    return evaluate(model, data, Normalize(data.source, 32, precision), precision, world)


def evaluated_on_sets(config, sizes):
    """The scores of an untrained model on sets of these sizes."""
    with join_world(config.compute) as world:
        torch.manual_seed(world.rank)  # ranks differ in their statistics, as in training
        model = build_model(config.model, 10, 32)
        for buffer in filter(torch.is_floating_point, model.buffers()):
            buffer.uniform_(0.5, 1.5)
        torch.manual_seed(0)
        for weight in model.parameters():
            nn.init.normal_(weight, std=0.1)
        return [evaluated(changed(config, data__limit=size), model, world) for size in sizes]


def test_every_image_counts_once_on_any_number_of_ranks(config):
    config = changed(config, model__name="resnet9", data__workers=0)
    alone = evaluated_on_sets(config, SIZES)  # of images in memory
    streamed = changed(config, data__where="stream")
    ranks = run_ranks(3, evaluated_on_sets, config, SIZES)
    for rank in [*ranks, *run_ranks(2, evaluated_on_sets, streamed, SIZES)]:
        for size, one, other in zip(SIZES, alone, rank, strict=True):
            assert int(other.confusion.sum()) == size
            assert torch.equal(other.confusion, one.confusion)
            assert other.loss == pytest.approx(one.loss, rel=1e-6)
            assert other.top5 == one.top5
            assert torch.equal(other.predictions.predicted, one.predictions.predicted)
            for name in ("probability", "target_probability"):
                mine, theirs = getattr(other.predictions, name), getattr(one.predictions, name)
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_scores_are_those_of_the_logits(config):
    config, world = changed(config, data__limit=40), World(torch.device("cpu"))
    source = EvalData(config.data, "val", world).source
    precision = Precision("fp32", config.compute, config.optim, world.device)
    model = build_model(config.model, 10, 32).eval()
    scores = evaluated(config, model, world)
    with torch.no_grad():
        images = Normalize(source, 32, precision)(source.pixels.permute(0, 3, 1, 2))
        logits = model(images)
    labels, ranked = source.labels, logits.argsort(dim=1, descending=True)
    is_right = ranked == labels[:, None]
    assert scores.top1 == pytest.approx(is_right[:, 0].float().mean().item())
    assert scores.top5 == pytest.approx(is_right[:, :5].any(1).float().mean().item())
    assert scores.loss == pytest.approx(nn.functional.cross_entropy(logits, labels).item())
    assert int(scores.confusion[labels[0], ranked[0, 0]]) >= 1
    probabilities = logits.softmax(1)
    assert torch.equal(scores.predictions.predicted, ranked[:, 0])
    torch.testing.assert_close(scores.predictions.probability, probabilities.max(1).values)
    truth = probabilities.gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(scores.predictions.target_probability, truth)
    assert scores.metrics()["val/ece"] == calibration_error(calibrate(scores.predictions))


def test_evaluation_changes_nothing(config):
    world, outputs = World(torch.device("cpu")), []
    model = build_model(changed(config, model__name="resnet9", model__dropout=0.5).model, 10, 32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    first, second = (evaluated(config, model, world) for _ in range(2))
    assert first.loss == second.loss  # dropout is off
    assert all(output.is_inference() and output.grad_fn is None for output in outputs)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])  # BatchNorm's statistics too
    assert model.training


def test_classes_are_listed_from_the_worst_and_top5_of_more_than_five():
    for num_classes, is_told in ((5, False), (6, True)):
        confusion, classes = torch.eye(num_classes).long(), tuple("abcdef"[:num_classes])
        scores = Scores(0.5, 1.0, 1.0, confusion, answers_of(classes, confusion))
        assert ("val/top5" in scores.metrics()) == is_told
        assert ("top-5" in scores_text(scores.metrics(), confusion, classes)) == is_told
    metrics = {"val/loss": 0.5, "val/top1": 0.75, "val/top5": 1.0}
    confusion = torch.tensor([[2, 1, 0], [0, 0, 1], [0, 0, 0]])
    lines = scores_text(metrics, confusion, ("ant", "bee", "cat")).splitlines()
    assert [line.split() for line in lines[:2]] == [["bee", "0.00%"], ["ant", "66.67%"]]
    assert len(lines) == 3  # nothing is known of cats
    assert "75.00%" in lines[2]
