"""The fast recipe for CIFAR-10: its first layer, its flips, its views in evaluation."""

import json
from pathlib import Path

import pytest
import torch
from conftest import changed, run_ranks
from torch import Tensor

from image_classifier.augment import build_augment
from image_classifier.config import (
    AugmentConfig,
    Config,
    ModelConfig,
)
from image_classifier.data.loader import TrainData
from image_classifier.evaluate import evaluate_run
from image_classifier.models import build_model
from image_classifier.models.airbench import Airbench
from image_classifier.precision import Precision
from image_classifier.preprocess import VIEWS, Normalize
from image_classifier.presets import cifar10_speed
from image_classifier.runtime.distributed import join_world
from image_classifier.train import train

AIRBENCH = ModelConfig(name="airbench", width=8)


@pytest.fixture
def fast(config: Config) -> Config:
    """The recipe on drawn shapes, small."""
    recipe = changed(cifar10_speed(), augment__cutout=0, augment__min_size=0)
    return changed(config, model=AIRBENCH, augment=recipe.augment, optim=recipe.optim)


def smooth(count: int) -> Tensor:
    """Images whose neighbouring pixels and colours are much alike: (count, 3, 12, 12)."""
    generator = torch.Generator().manual_seed(0)
    grey, noise = torch.randn((2, count, 3, 12, 12), generator=generator)
    return grey[:, :1] + grey[:, :1].roll(1, 3) + noise / 2


def test_the_first_layer_whitens_the_training_images() -> None:
    images = smooth(400)
    model = build_model(AIRBENCH, 7, 12, sample=lambda count: images[:count])
    outputs = model.whiten(images).transpose(0, 1).flatten(1)  # (filters, places)
    assert torch.corrcoef(images.transpose(0, 1).flatten(1))[0, 1] > 0.8
    assert not model.whiten.weight.requires_grad
    found, expected = outputs @ outputs.T / outputs.shape[1], torch.eye(12)
    torch.testing.assert_close(found[:12, :12], expected, atol=0.01, rtol=0)
    torch.testing.assert_close(found[:12, 12:], -expected, atol=0.01, rtol=0)


def sides(config: Config) -> dict[tuple[int, int], bool]:
    """Whether an image of this rank was mirrored, by epoch and index, in two epochs."""
    with join_world(config.compute) as world:
        data = TrainData(config, world)
        precision = Precision("fp32", config.compute, config.optim, world.device)
        normalize = Normalize(data.source, 32, precision)
        augment = build_augment(config.augment, data, normalize, world, config.seed)
        found = {}
        for step, batch in enumerate(data.batches(0, 2 * data.steps_per_epoch)):
            images, plain = augment(batch, step)[0], normalize(batch.images)
            for index, image, seen in zip(
                data.indices_at(step).tolist(), plain, images, strict=True
            ):
                is_mirrored = torch.equal(seen, image.flip(2))
                assert is_mirrored or torch.equal(seen, image)
                found[step // data.steps_per_epoch, index] = is_mirrored
        return found


def test_each_epoch_shows_the_other_side_of_every_image_on_any_rank(fast: Config) -> None:
    fast = changed(fast, augment__crop="none")
    alone = sides(fast)
    assert 16 < sum(alone[0, index] for index in range(64)) < 48
    assert all(alone[0, index] != alone[1, index] for index in range(64))
    one, other = run_ranks(2, sides, fast)
    assert one | other == alone


@pytest.mark.parametrize("tta", VIEWS)
def test_the_views_of_an_image_have_a_total_weight_of_1(config: Config, tta: str) -> None:
    with join_world(config.compute) as world:
        source = TrainData(config, world).source
        precision = Precision("fp32", config.compute, config.optim, world.device)
    normalize = Normalize(source, 32, precision, AugmentConfig(tta=tta))
    images = source.pixels[:4].permute(0, 3, 1, 2)
    seen, weights = zip(*normalize.views(images), strict=True)
    assert sum(weights) == 1
    assert torch.equal(seen[0], normalize(images))
    assert len({view.sum(dtype=torch.float64).item() for view in seen}) >= len(seen) / 2
    # The model's prediction for an image is that for its mirror image.
    whole, turned = (
        sum(weight * view[:, :, 8:20, 8:12] for view, weight in normalize.views(pixels))
        for pixels in (images, images.flip(3))
    )
    assert torch.allclose(whole, turned, atol=1e-5) == (tta != "none")


def test_a_run_resumes_and_is_evaluated_with_the_first_layer_that_it_had(
    fast: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = train(fast)
    monkeypatch.setattr(Airbench, "fit", lambda model, _: model.whiten.weight.data.zero_())
    assert train(fast).loss == scores.loss
    best = evaluate_run(fast.run.dir, "val", "", fast.compute)
    rows = Path(fast.run.dir, "metrics.jsonl").read_text().splitlines()
    assert best.top1 == max(json.loads(row).get("val/top1", 0) for row in rows)
