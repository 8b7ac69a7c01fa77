"""Images that can't be read: a run ends and names them; masked ones add nothing to the loss."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import changed, read_image

from image_classifier.config import OptimConfig
from image_classifier.data import Augmented, splits
from image_classifier.data.loader import EvalData, TrainData
from image_classifier.data.samples import LEFT_OUT
from image_classifier.errors import FaultError, UserError
from image_classifier.extensions import finding
from image_classifier.runtime.distributed import World
from image_classifier.tasks import class_loss

CPU = World(torch.device("cpu"))


def test_the_loss_ignores_masked_images():
    logits = torch.randn(4, 2, generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss_of = class_loss(OptimConfig(label_smoothing=0.1), 4)
    labels, weights = torch.tensor([0, LEFT_OUT, 1, LEFT_OUT]), torch.tensor([1.0, 1.0, 3.0, 3.0])
    readable, masked = (Augmented(None, labels[n::2], weights[n::2]) for n in range(2))
    loss = loss_of(logits, Augmented(None, labels, weights))
    loss.backward()
    assert torch.equal(loss, loss_of(logits[::2], readable))
    assert logits.grad.all(1).tolist() == [True, False] * 2
    assert loss_of(logits[1::2], masked) == 0


@pytest.mark.parametrize("weights", [None, torch.ones(2)])
def test_nor_does_smoothing_teach_an_image_that_has_no_share_of_a_class(weights):
    logits = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    loss_of = class_loss(OptimConfig(label_smoothing=0.1), 2)
    labels = torch.tensor([1, LEFT_OUT])
    shares = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    found, expected = (loss_of(logits, Augmented(None, y, weights)) for y in (shares, labels))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("cures", [("find all", "skip them"), ("skip them",), ()])
def test_what_to_do_about_an_unreadable_image_is_said(on_photos, monkeypatch, cures):
    tools = {cure: SimpleNamespace(CURE=cure) for cure in cures}
    monkeypatch.setattr(finding, "find_tools", lambda _: tools)
    monkeypatch.setattr(splits, "find_tools", lambda _: tools)
    source = Mock()
    source.name.return_value = "3.jpg"
    note = splits.open_note(source, on_photos.data, "")
    with pytest.raises(UserError) as error:
        note(3, "image file is truncated")
    said = str(error.value)
    assert said.endswith(f"truncated; {', or '.join(['replace it', *cures])}")


@pytest.mark.parametrize("where", ["stream", "device"])
def test_a_bad_image_ends_a_run(on_spoilt_photos, where):
    config = changed(on_spoilt_photos, data__where=where)
    with pytest.raises(UserError, match=r"cannot read image .*(ant/2\.jpg'|line\.jpg'): (not|No) "):
        list(TrainData(config, CPU).batches(0, 3))
    with pytest.raises(UserError, match=r"cannot read image .*ant/12\.jpg': not a JPEG"):
        list(EvalData(config.data, "val", CPU).batches())


def test_what_the_system_lacks_is_not_the_fault_of_a_file(monkeypatch):
    error = OSError(errno.EMFILE, "Too many open files")
    monkeypatch.setattr(os, "open", Mock(side_effect=error))
    with pytest.raises(FaultError, match=r"no more images can be read: Too many open files, at"):
        read_image(Path("x.jpg"))
