"""What a run sees is decided by the place in it: not by workers, ranks, or where it began."""

import hashlib
import random

import numpy as np
import pytest
import torch
from conftest import changed, run_ranks

from image_classifier.augment import build_augment
from image_classifier.data.loader import TrainData
from image_classifier.precision import Precision
from image_classifier.preprocess import Normalize
from image_classifier.runtime import seeding
from image_classifier.runtime.distributed import join_world


def opened(config, world):
    """The training images, and how they are normalized and augmented."""
    data = TrainData(config, world)
    precision = Precision("fp32", config.compute, config.optim, world.device)
    normalize = Normalize(data.source, config.data.max_size, precision)
    return data, normalize, build_augment(config.augment, data, normalize, world, config.seed)


def seen(config, start=0, stop=8):
    """For each step: this rank's images by number, and by a digest of what the model sees."""
    with join_world(config.compute) as world:
        data, _, augment = opened(config, world)
        steps = []
        for step, batch in enumerate(data.batches(start, stop), start=start):
            images, labels = augment(batch, step)
            digests = [
                hashlib.sha256(image.contiguous().numpy().tobytes()).hexdigest()[:16] + str(label)
                for image, label in zip(images, labels.tolist(), strict=True)
            ]
            steps.append((data.indices_at(step).tolist(), digests))
        return steps


def joined(lists):
    """One list of all."""
    return [item for part in lists for item in part]


def test_an_epoch_visits_every_image_once_in_an_order_of_its_own():
    orders = [seeding.order_at(seed, epoch, 100).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert all(sorted(order) == list(range(100)) for order in orders)
    assert len({*map(tuple, orders)}) == 4
    # It never changes between versions.
    assert seeding.hash64(1, 2, 3) == 0x6AE515C1C0AC7E37
    assert seeding.order_at(seed=0, epoch=0, count=10).tolist() == [6, 0, 7, 4, 5, 3, 9, 2, 1, 8]
    keys = [(0,), (0, 0), (0, 1), (1, 0), (1,), (2**40,), (0, 2**40)]
    assert len({seeding.seed_at(*key) for key in keys}) == len(keys)


def draws(count):
    """What each generator that a transform may use draws: so many bytes."""
    return [
        list(random.randbytes(count)),
        list(np.random.bytes(count)),
        torch.randint(256, (count,)).tolist(),
    ]


def test_seeded_draws_leave_other_draws_alone():
    with seeding.seeded(0):
        expected = [draws(8), draws(8)]
    with seeding.seeded(0):
        first = draws(8)
        with seeding.seeded(1, 2):
            inside = draws(8)
        with seeding.seeded(1, 2):
            assert draws(8) == inside
        assert [first, draws(8)] == expected
    assert all(one != other for one, other in zip(first, inside, strict=True))


def test_each_step_and_each_run_draws_its_own():
    cpu, found = torch.device("cpu"), []
    for place in (3, 3, 4):
        seeding.seed_everything(place, deterministic=False, device=cpu)
        found.append(draws(8))
        seeding.seed_layers(0, place, 0, cpu)
        found[-1] += draws(8)
    assert found[0] == found[1]
    assert all(one != other for one, other in zip(found[0], found[2], strict=True))


@pytest.mark.parametrize(
    ("knobs", "most_alike"),  # of 64 images
    [
        ({}, 4),
        ({"augment__crop": "resized"}, 4),
        ({"augment__crop": "none"}, 44),  # half are mirrored in one of two epochs
        ({"augment__policy": "randaugment", "augment__flip": "none", "data__workers": 0}, 20),
    ],
)
def test_each_epoch_augments_anew(config, knobs, most_alike):
    crop = {"augment__crop": "none"} if "augment__policy" in knobs else {}
    steps = seen(changed(config, **knobs, **crop))
    first, second = (
        dict(zip(joined(indices), joined(digests), strict=True))
        for indices, digests in (zip(*epoch, strict=True) for epoch in (steps[:4], steps[4:]))
    )
    assert first.keys() == second.keys()
    assert sum(first[image] == second[image] for image in first) <= most_alike


def test_resident_and_streamed_images_are_the_same_from_any_step(config):
    resident = seen(config)
    for where, workers in (("device", 0), ("host", 0), ("stream", 0), ("stream", 2)):
        assert seen(changed(config, data__where=where, data__workers=workers), 5) == resident[5:]


def test_workers_crop_alike_and_nothing_crops_again(on_photos):
    config = changed(on_photos, augment__crop="resized", data__workers=0)
    with_policy = changed(config, augment__policy="trivialaugment")
    assert seen(changed(with_policy, data__workers=2)) == seen(with_policy)
    with join_world(config.compute) as world:
        data, normalize, augment = opened(config, world)
        batch = next(data.batches(0, 1))
        assert torch.equal(augment(batch, 0)[0], normalize(batch.images))


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_share_the_batches_that_one_process_sees(config, size):
    mix = {"augment__mixup": 0.4, "augment__cutmix": 1.0} if size == 2 else {}
    config = changed(config, data__batch_size=12, augment__cutout=8, **mix)
    alone = seen(config)
    ranks = run_ranks(size, seen, config)
    for step, (indices, digests) in enumerate(alone):
        assert joined(rank[step][0] for rank in ranks) == indices
        assert joined(rank[step][1] for rank in ranks) == digests
