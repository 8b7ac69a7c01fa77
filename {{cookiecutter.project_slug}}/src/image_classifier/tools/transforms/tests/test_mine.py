"""One's own transforms draw by the place of an image alone, and leave the generators alone."""

import random
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import changed, run_ranks
from test_order import draws, seen
from torchvision.transforms import v2

from image_classifier.config import AugmentConfig
from image_classifier.errors import UserError
from image_classifier.tools.transforms import mine
from image_classifier.tools.transforms.policy import (
    NUM_DRAWS,
    open_policy,
)

README = Path(mine.__file__).with_name("README.md")
IMAGES = torch.randint(256, (6, 12, 12, 3), generator=torch.Generator().manual_seed(0)).byte()


def noisy(image):
    """An image plus a number of each generator, in place."""
    image += int(random.random() * 80) + int(np.random.rand() * 80) + torch.randint(80, ()).byte()
    return image


def halved(image):
    """An image at half the brightness."""
    return image // 2


def seen_with(config, *steps):
    """What a rank sees with a transform that draws."""
    mine.TRANSFORMS = (noisy,)
    return seen(config, *steps)


@pytest.fixture
def own(monkeypatch):
    """A function that takes other transforms in place of `mine.TRANSFORMS`."""
    return lambda *transforms: monkeypatch.setattr(mine, "TRANSFORMS", transforms)


def test_transforms_are_applied_in_their_order_after_all_others(own):
    own(halved, lambda image: image + 10)
    given = torch.rand(6, NUM_DRAWS)
    flipped = open_policy(AugmentConfig(vertical_flip=True), 3, 8)(IMAGES, given)
    assert torch.equal(flipped, open_policy(AugmentConfig(vertical_flip=True), 3, 8)(IMAGES, given))
    own()
    only_flipped = open_policy(AugmentConfig(vertical_flip=True), 3, 8)(IMAGES, given)
    assert torch.equal(flipped, only_flipped // 2 + 10)


def test_draws_depend_on_the_place_alone_and_generators_go_on_as_before(own):
    own(noisy)
    transform = open_policy(AugmentConfig(), 3, 8)
    given, whole = torch.rand(6, NUM_DRAWS), IMAGES.clone()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    alone = draws()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    first = transform(IMAGES, given)
    assert draws() == alone
    assert torch.equal(IMAGES, whole)
    added = (first.int() - IMAGES.int())[:, 0, 0, 0] % 256
    assert len({*added.tolist()}) >= 5
    for number in range(6):
        part = slice(number, number + 1)
        assert torch.equal(transform(IMAGES[part], given[part]), first[part])
    assert not torch.equal(transform(IMAGES, given.flip(0)), first)


def test_ranks_and_a_resumed_run_see_what_one_rank_sees(config, own):
    own(noisy)
    config = changed(config, data__batch_size=12, data__workers=0)
    whole = seen(config)
    assert seen(config, 3) == whole[3:]
    first, second = run_ranks(2, seen_with, config)
    for found, one, other in zip(whole, first, second, strict=True):
        assert found[1] == one[1] + other[1]
    own()
    assert seen(config) != whole


def test_a_transform_may_return_a_view_of_the_image(own):
    own(lambda image: image.transpose(0, 1))
    found = open_policy(AugmentConfig(), 3, 8)(IMAGES, torch.rand(6, NUM_DRAWS))
    assert torch.equal(found, IMAGES.transpose(1, 2))


def test_float_images_are_rounded(own):
    own(halved)
    transform = open_policy(AugmentConfig(), 3, 8)
    found = transform(torch.full((1, 8, 8, 3), 101.7), torch.rand(1, NUM_DRAWS))
    assert found.dtype == torch.uint8
    assert found.unique().tolist() == [51]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda image: image.permute(2, 0, 1), r"not uint8 \(3, 12, 12\)"),
        (lambda image: image.float(), r"not float32 \(12, 12, 3\)"),
        (lambda image: image.numpy(), "not ndarray"),
        (v2.ToDtype(torch.float16), r"not float16 \(12, 12, 3\)"),
    ],
)
def test_a_transform_that_returns_no_such_image_is_named(own, wrong, said):
    own(halved, wrong)
    transform = open_policy(AugmentConfig(), 3, 8)
    with pytest.raises(
        UserError, match=rf"mine.py: .* must return a uint8 tensor \(12, 12, 3\), .*{said}"
    ):
        transform(IMAGES, torch.rand(6, NUM_DRAWS))


def test_transforms_of_8_bits_are_refused_for_16(own):
    own(halved)
    with pytest.raises(UserError, match=r"which are of 8 bits; --data.bits is 16"):
        open_policy(AugmentConfig(), 3, 16)


class Recorder:
    """In place of albumentations' Compose: a transform with a generator of its own."""

    def __init__(self, transforms):
        self.transforms = transforms

    def set_random_seed(self, seed):
        """Seed it."""
        self.random = np.random.default_rng(seed)

    def __call__(self, image):
        """The image, changed."""
        shift = self.random.integers(40, size=image.shape, dtype=np.uint8)
        return {"image": image // 2 + shift}


@pytest.mark.parametrize("language", ["diff", "patch"])
def test_the_examples_of_the_readme_are_transforms_whose_draws_are_seeded(
    language, tmp_path, monkeypatch, own
):
    """torchvision's, and albumentations', in whose place is something small if it is not there."""
    given = re.findall(rf"^```{language}\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    name = re.search(r"(?m)^\+\+\+ b/(.*)$", given[0])[1]
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text(Path(mine.__file__).read_text())
    for patch in given:
        subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=patch, text=True, check=True)
    if language == "patch" and "albumentations" not in sys.modules:
        theirs = SimpleNamespace(Compose=Recorder, RandomGamma=dict, CoarseDropout=dict)
        monkeypatch.setitem(sys.modules, "albumentations", theirs)
    found = {}
    exec(compile(path.read_text(), "mine.py", "exec"), found)
    own(*found["TRANSFORMS"])
    transform, numbers = open_policy(AugmentConfig(), 3, 8), torch.rand(6, NUM_DRAWS)
    first = transform(IMAGES, numbers)
    assert torch.equal(transform(IMAGES, numbers), first)
    assert not torch.equal(transform(IMAGES, numbers.flip(0)), first)
