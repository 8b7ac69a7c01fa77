"""Evaluation counts every image once, on any number of processes, and changes nothing."""

import pytest
import torch
from conftest import answers_of, changed, run_ranks
from torch import nn
from torch.testing import assert_close

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

CPU = World(torch.device("cpu"))
SIZES = (1, 2, 3, 7, 23)


def answers(scores):
    """What is predicted for each image, and how surely."""
    found = scores.predictions
    return found.predicted, found.probability, found.target_probability


def evaluated(config, model, world):
    """The scores of a model on the validation images."""
    precision = Precision("fp32", config.compute, config.optim, world.device)
    data = EvalData(config.data, "val", world)
    return evaluate(model, data, Normalize(data.source, 32, precision), precision, world)


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
    for rank in run_ranks(3, evaluated_on_sets, config) + run_ranks(2, evaluated_on_sets, streamed):
        for size, one, other in zip(SIZES, alone, rank, strict=True):
            assert int(other.confusion.sum()) == size
            assert torch.equal(other.confusion, one.confusion)
            assert (other.loss, other.top5) == (pytest.approx(one.loss, rel=1e-6), one.top5)
            assert_close(answers(other), answers(one), rtol=1e-5, atol=1e-6)


def test_scores_are_those_of_the_logits_and_the_model_is_left_as_it_was(config):
    config, outputs = changed(config, model__name="resnet9", data__limit=40), []
    model = build_model(changed(config, model__dropout=0.5).model, 10, 32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    scores = evaluated(config, model, CPU)
    assert all(output.is_inference() and output.grad_fn is None for output in outputs)
    assert_close(dict(model.state_dict()), before, rtol=0, atol=0)  # BatchNorm's statistics too
    assert model.training
    source = scores.predictions.source
    images = (source.pixels / 255 - torch.tensor(source.mean)) / torch.tensor(source.std)
    with torch.no_grad():
        logits = model.eval()(images.permute(0, 3, 1, 2))
    labels, ranked = source.labels, logits.argsort(dim=1, descending=True)
    shares = [(ranked == labels[:, None])[:, :k].any(1).float().mean().item() for k in (1, 5)]
    loss = nn.functional.cross_entropy(logits, labels).item()
    assert [scores.top1, scores.top5, scores.loss] == pytest.approx([*shares, loss])
    assert int(scores.confusion[labels[0], ranked[0, 0]]) >= 1
    sure = logits.softmax(1)
    truth = sure.gather(1, labels[:, None])[:, 0]
    assert_close(answers(scores), (ranked[:, 0], sure.max(1).values, truth))
    assert scores.metrics()["val/ece"] == calibration_error(calibrate(scores.predictions))


def test_classes_are_listed_from_the_worst_and_top5_of_more_than_five():
    for num_classes, is_told in ((5, False), (6, True)):
        confusion, classes = torch.eye(num_classes).long(), tuple("abcdef"[:num_classes])
        metrics = Scores(0.5, 1.0, 1.0, confusion, answers_of(classes, confusion)).metrics()
        assert ("val/top5" in metrics) == is_told
        assert ("top-5" in scores_text(metrics, confusion, classes)) == is_told
    confusion = torch.tensor([[2, 1, 0], [0, 0, 1], [0, 0, 0]])
    text = scores_text({"val/loss": 0.5, "val/top1": 0.75}, confusion, ("ant", "bee", "cat"))
    first, second, last = (line.split() for line in text.splitlines())  # nothing is known of cats
    assert (first, second) == (["bee", "0.00%"], ["ant", "66.67%"])
    assert "75.00%," in last
