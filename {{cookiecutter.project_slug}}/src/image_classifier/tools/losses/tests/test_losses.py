"""Losses for several labels: as their papers say, and only for what they are made for."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import changed
from torch.testing import assert_close

from image_classifier.config import Config
from image_classifier.data import LEFT_OUT, Augmented
from image_classifier.errors import UserError
from image_classifier.tasks import build_loss

DATA = SimpleNamespace(source=SimpleNamespace(is_multi_label=True))


def loss_with(loss, batch_size, smoothing=0.0):
    """The loss of a run with several labels."""
    config = changed(Config(), model__task="multi-label")
    config = changed(config, optim__loss=loss, optim__label_smoothing=smoothing)
    return build_loss(config, DATA, batch_size).of


@pytest.mark.parametrize("loss", ["focal", "asymmetric"])
def test_a_loss_ignores_unknown_labels_and_its_parts_add_up(loss):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 4, generator=generator).requires_grad_()
    labels = torch.randint(-1, 2, (6, 4), dtype=torch.int8, generator=generator)
    labels[2] = LEFT_OUT
    batch = Augmented(None, labels, torch.rand(6, generator=generator))
    loss_of = loss_with(loss, 6, 0.1)
    parts = ((0, 4), (4, 6))
    found = sum(loss_of(logits[start:stop], batch.part(start, stop)) for start, stop in parts)
    assert_close(found, loss_of(logits, batch))
    found.backward()
    assert torch.equal(logits.grad != 0, labels >= 0)


def test_a_loss_is_that_of_its_paper():
    logit = torch.tensor([[1.5]])
    share = logit.sigmoid().item()
    no = share - 0.05
    focal = -0.25 * (1 - share) ** 2 * np.log(share), -0.75 * share**2 * np.log(1 - share)
    asymmetric = -np.log(share), -(no**4) * np.log(1 - no)
    for loss, expected in (("focal", focal), ("asymmetric", asymmetric)):
        batches = [Augmented(None, torch.tensor([[label]])) for label in (1, 0)]
        found = [loss_with(loss, 1)(logit, batch).item() for batch in batches]
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("loss", ["focal", "asymmetric"])
def test_what_they_are_not_for_is_refused(loss):
    with pytest.raises(UserError, match=r"needs --model\.task multi-label"):
        changed(Config(), optim__loss=loss)
    pytest.importorskip("image_classifier.tools.balance")
    config = changed(Config(), model__task="multi-label", data__balance="loss")
    with pytest.raises(UserError, match=f"weights --optim.loss entropy, not {loss}"):
        changed(config, optim__loss=loss)
