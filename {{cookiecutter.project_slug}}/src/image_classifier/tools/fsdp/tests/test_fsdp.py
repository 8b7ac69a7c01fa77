"""FSDP learns what DDP learns, and its checkpoints are as safe and as exact."""

import pytest
from conftest import changed, losses, run_ranks

from image_classifier.train import train


@pytest.fixture
def config(config):
    """Two epochs of two steps, on batches that two and three ranks share."""
    config = changed(config, data__batch_size=24, data__limit=60, compute__parallel="fsdp")
    return changed(config, model__name="resnet9_gn", model__width=8)


@pytest.mark.parametrize("size", [2, 3])
def test_fsdp_learns_as_ddp(config, size, tmp_path):
    ddp = changed(config, compute__parallel="ddp", run__dir=str(tmp_path / "ddp"))
    run_ranks(size, train, config)
    run_ranks(size, train, ddp)
    assert losses(config.run.dir) == pytest.approx(losses(ddp.run.dir), rel=1e-3)
