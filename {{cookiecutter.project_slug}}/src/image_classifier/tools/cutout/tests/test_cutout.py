"""A square of each image is blanked, elsewhere in each epoch, and nothing else."""

import torch
from conftest import changed
from test_order import by_image, seen

from image_classifier.config import AugmentConfig
from image_classifier.runtime import seeding
from image_classifier.tools.cutout import batches
from image_classifier.tools.cutout.batches import cutout


def test_cutout_blanks_a_square_and_nothing_else():
    images = torch.ones(50, 3, 12, 12)
    cutout(images, torch.rand(50, 2), 4)
    blank = (images == 0).sum(dim=(1, 2, 3)) / 3
    assert blank.max() == 16
    assert blank.min() >= 4  # a quarter, at a corner
    image = torch.ones(1, 3, 12, 12)
    cutout(image, torch.tensor([[0.0, 0.99]]), 4)  # from above, and from the left
    assert (image[0, 0] == 0).nonzero().tolist() == [[y, x] for y in (0, 1) for x in (9, 10, 11)]


def test_its_draws_are_those_that_they_always_were_and_no_others_take(config, monkeypatch):
    drawn = []
    monkeypatch.setattr(batches, "cutout", lambda _, draws, side: drawn.append((draws, side)))
    seen(changed(config, augment__cutout=8, seed=7), 3, 4)
    draws = torch.rand(16, 9, generator=seeding.generator_at(seeding.BATCH, 7, 3))
    assert torch.equal(drawn[0][0], draws[:, 7:])
    assert drawn[0][1] == 8


def test_each_epoch_blanks_another_square(config):
    config = changed(config, augment=AugmentConfig(crop="none", flip="none"))
    plain, config = by_image(seen(config)), changed(config, augment__cutout=8)
    first, second = by_image(seen(config, stop=4)), by_image(seen(config, start=4))
    assert first.keys() == second.keys()
    assert len(first.items() & second.items()) <= 4
    for epoch in (first, second):
        assert len(epoch.items() & plain.items()) <= 4
