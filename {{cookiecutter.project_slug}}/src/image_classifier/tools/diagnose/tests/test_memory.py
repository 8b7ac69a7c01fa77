"""Each time that memory runs out leaves an account, and changes nothing else."""

import json
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import changed, run_ranks

from image_classifier.errors import FaultError
from image_classifier.extensions import of_tools
from image_classifier.models.resnet9 import ResNet9
from image_classifier.runtime.distributed import World
from image_classifier.runtime.launch import attempt
from image_classifier.runtime.out_of_memory import (
    OutOfMemoryError,
)
from image_classifier.tools.diagnose import memory
from image_classifier.train import train

FAILURE = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"


def lack_memory(monkeypatch, most, first=1):
    """Let training fail with more than `most` images, from forward pass `first` on."""
    passes, forward = [], ResNet9.forward

    def forward_or_fail(model, images):
        if model.training:
            passes.append(images)
            if len(images) > most and len(passes) >= first:
                raise torch.OutOfMemoryError(FAILURE)
        return forward(model, images)

    monkeypatch.setattr(ResNet9, "forward", forward_or_fail)


def accounts(config):
    """What was written, by the names of the files."""
    files = sorted(Path(config.run.dir, "memory").iterdir())
    return {path.name: json.loads(path.read_text()) for path in files}


def test_every_lack_of_memory_is_accounted_for(config, monkeypatch, capsys):
    config = changed(config, optim__ema_decay=0.9)
    lack_memory(monkeypatch, most=5, first=2)  # the first step has memory enough
    codes = [attempt(lambda: train(config)) for _ in range(3)]
    assert codes == [OutOfMemoryError.code, OutOfMemoryError.code, 0]
    found = accounts(config)
    names = ["step_00000001_micro_8_rank0.json", "step_00000002_micro_16_rank0.json"]
    assert list(found) == names
    account = found[names[1]]
    assert (account["step"], account["micro_batch"], account["asked_for"]) == (2, 16, "2.00 GiB")
    taken = account["bytes"]
    assert taken["averaged weights"] == taken["weights"] >= taken["optimizer"] > 0
    assert taken["images"] > 64 * 32 * 32 * 3
    assert taken["gradients"] == 0  # they are gone before a forward pass
    assert sum(taken.values()) == account["device"]["peak"]
    out, err = capsys.readouterr()
    assert (
        f"memory when it ran out: {config.run.dir}/memory/{names[1]}; activations and program take"
        in out
    )
    can_recompute = "compute.gradient_checkpointing" in of_tools()
    smaller = "a smaller --data.image-size or smaller --model.name needs less"
    advice = memory.RECOMPUTE if can_recompute else smaller
    most, peak = (n / 2**30 for n in (taken["activations and program"], account["device"]["peak"]))
    assert f"take most, {most:.3g} of {peak:.3g} GB: {advice}\n" in out
    assert "started again from the last save with 8" in err


@pytest.mark.parametrize(
    ("most", "advice"), [("images", "--data.where host"), ("weights", memory.SMALLER)]
)
def test_advice_is_for_what_takes_most(most, advice, config, monkeypatch, capsys):
    gigabytes = {"images": 1, "weights": 1} | {most: 9}
    taken = {part: count * 2**30 for part, count in gigabytes.items()}
    monkeypatch.setattr(memory, "bytes_by_part", lambda *_: taken)
    monkeypatch.setattr(memory, "device_account", lambda _: {"peak": 11 * 2**30})
    Path(config.run.dir).mkdir()
    val = SimpleNamespace(batch_size=4)
    setup = SimpleNamespace(config=config, world=World(torch.device("cpu")), val_data=val)
    memory.write_account(setup, SimpleNamespace(step=1), "")
    assert f"{most} take most, 9 of 11 GB: {advice}\n" in capsys.readouterr().out


def averaged_bytes(config):
    """What the averaged weights of a rank take, by the account of the second step."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        lack_memory(patch, most=5, first=2)
        patch.setattr(memory, "write_json", lambda _, about: found.append(about["bytes"]))
        with pytest.raises(OutOfMemoryError):
            train(config)
    return found[0]["averaged weights"]


@pytest.mark.skipif("compute.parallel" not in of_tools(), reason="the tool fsdp is not here")
def test_of_what_ranks_share_the_part_of_a_rank_counts(config):
    config = changed(config, data__batch_size=24, optim__ema_decay=0.9)
    ways = [
        changed(config, compute__parallel=way, run__dir=f"{config.run.dir}-{way}")
        for way in ("ddp", "fsdp")
    ]
    (whole, _), parts = (run_ranks(2, averaged_bytes, own) for own in ways)
    assert 0 < max(parts) < 0.6 * whole


def test_the_same_lack_again_overwrites_nothing(config, monkeypatch):
    lack_memory(monkeypatch, most=0)
    for _ in range(2):
        with pytest.raises(FaultError, match="not even one image"):
            train(changed(config, optim__accumulate=16))
    name = "step_00000001_micro_1_rank0"
    assert list(accounts(config)) == [f"{name}.json", f"{name}_2.json"]


def test_another_error_is_no_lack_of_memory(monkeypatch):
    write = Mock()
    monkeypatch.setattr(memory, "write_account", write)
    for error in (ValueError("wrong shape"), torch.OutOfMemoryError(FAILURE)):
        with pytest.raises(type(error)), memory.watch(None, None):
            raise error
    write.assert_called_once()


def test_an_account_that_fails_hides_nothing(config, monkeypatch):
    lack_memory(monkeypatch, most=5)
    monkeypatch.setattr(memory, "bytes_by_part", lambda *_: 1 / 0)
    with pytest.raises(OutOfMemoryError, match="with micro-batch 16"):
        train(config)
    assert accounts(config) == {}
