"""FSDP learns what DDP learns, and its checkpoints are as safe and as exact."""

import json
import os
import pickle
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from conftest import after_each_step, changed, losses, run_ranks, start
from safetensors.torch import load_file

from image_classifier import checkpoint
from image_classifier.cli import main
from image_classifier.models import build_model, load_best, read_checkpoint, saved_steps, vit
from image_classifier.runtime.distributed import local_part
from image_classifier.tools.fsdp import checkpoints, sharding
from image_classifier.train import train
from image_classifier.train_state import TrainState


@pytest.fixture
def config(config):
    """Two epochs of two steps, on batches that two and three ranks share."""
    config = changed(config, data__batch_size=24, data__limit=60, compute__parallel="fsdp")
    return changed(config, run__log_every_steps=1)


@pytest.fixture
def often(config):
    """A run with all that has a state, which saves after each step."""
    config = changed(config, optim__name="adamw", optim__lr=1e-3, optim__ema_decay=0.9)
    return changed(config, run__evaluate_every_epochs=0.5)


def folders(config):
    """The folder of its checkpoints, and the names of what is in it."""
    folder = Path(config.run.dir, "checkpoints")
    return folder, sorted(path.name for path in folder.iterdir())


def train_small(config):
    """Train; a vision transformer has three narrow blocks."""
    vit.WIDTH, vit.DEPTH = 48, 3
    return train(config).loss


COMBINED = {"optim__ema_decay": 0.9, "optim__accumulate": 2, "optim__clip_norm": 0.1}
LAYERS = {"optim__name": "adamw", "optim__lr": 1e-3, "optim__layer_decay": 0.5}


@pytest.mark.parametrize(
    ("size", "name", "knobs", "rel"),
    [
        (2, "resnet9_gn", COMBINED, 1e-4),
        (3, "resnet9", {"precision": "bf16"}, 1e-3),
        (3, "vit_s", LAYERS | {"precision": "bf16"}, 1e-3),
        (2, "airbench", {"model__width": 16}, 1e-4),
    ],
)
def test_fsdp_learns_as_ddp(config, size, name, knobs, rel, tmp_path):
    config = changed(config, model__name=name, **knobs)
    ddp = changed(config, compute__parallel="ddp", run__dir=str(tmp_path / "ddp"))
    run_ranks(size, train_small, config)
    run_ranks(size, train_small, ddp)
    print(losses(config.run.dir), losses(ddp.run.dir))
    assert losses(config.run.dir) == pytest.approx(losses(ddp.run.dir), rel=rel)
