"""What a run sees is decided by the place in it: not by workers, ranks, or where it began."""

import hashlib
import random
from itertools import chain

import numpy as np
import pytest
import torch
from conftest import changed, mixed, run_ranks

from image_classifier.augment import build_augment
from image_classifier.config import AugmentConfig
from image_classifier.data import open_dataset
from image_classifier.data.loader import TrainData
from image_classifier.data.samples import Samples
from image_classifier.precision import Precision
from image_classifier.preprocess import Normalize
from image_classifier.runtime import seeding
from image_classifier.runtime.distributed import join_world
from image_classifier.runtime.seeding import sides_at


def opened(config, world):
    """The training images, and how they are normalized and augmented."""
    data = TrainData(config, world)
    precision = Precision("fp32", config.compute, config.optim, world.device)
    normalize = Normalize(data.source, config.data.max_size, precision)
    return data, normalize, build_augment(config.augment, data, normalize, config.seed)


def seen(config, start=0, stop=8):
    """For each step: this rank's images by number, and by a digest of what the model sees."""
    with join_world(config.compute) as world:
        data, _, augment = opened(config, world)
        steps = []
        for step, batch in enumerate(data.batches(start, stop), start=start):
            images, labels, _ = augment(batch, step)
            digests = [
                hashlib.sha256(image.contiguous().numpy().tobytes()).hexdigest()[:16] + str(label)
                for image, label in zip(images, labels.tolist(), strict=True)
            ]
            steps.append((data.indices_at(step).tolist(), digests))
        return steps


def by_image(steps):
    """What was seen of each image."""
    return {image: digest for step in steps for image, digest in zip(*step, strict=True)}


def test_an_epoch_visits_every_image_once_in_an_order_of_its_own():
    orders = [seeding.order_at(seed, epoch, 100).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert all(sorted(order) == list(range(100)) for order in orders)
    assert len({*map(tuple, orders)}) == 4
    # It never changes between versions.
    assert seeding.hash64(1, 0, 2**40) == 0x941F001288298404
    assert seeding.order_at(seed=0, epoch=0, count=10).tolist() == [6, 0, 7, 4, 5, 3, 9, 2, 1, 8]


def draws():
    """What each generator that a transform may use draws next."""
    return random.random(), np.random.rand(), torch.rand(()).item()


def test_draws_depend_on_the_place_and_seeded_ones_leave_others_alone():
    cpu, found = torch.device("cpu"), []
    for place, key in ((3, 1), (3, 2), (4, 1)):
        seeding.seed_everything(place, deterministic=False, device=cpu)
        outside = draws()
        seeding.seed_layers(0, place, 0, cpu)
        outside += draws()[-1:]  # torch's
        with seeding.seeded(key, 0):
            inside = draws()
            with seeding.seeded(key, place):
                draws()
            inside += draws()
        found.append((outside + draws(), inside))
    (one, first), (again, second), (other, same) = found
    assert (one, first) == (again, same)
    assert not {*one} & {*other}
    assert not {*first} & {*second, *one}


@pytest.mark.parametrize(
    ("knobs", "most_alike", "most_plain"),  # of 64 images
    [
        ({"crop": "pad"}, 4, 4),
        ({"crop": "resized"}, 4, 4),
        ({"crop": "none"}, 44, 44),  # half are mirrored in one of two epochs
        ({"crop": "none", "flip": "alternating"}, 0, 48),  # each of them in one
    ],
)
def test_each_epoch_augments_anew(config, knobs, most_alike, most_plain):
    config = changed(config, data__workers=0, augment=AugmentConfig(crop="none", flip="none"))
    plain, config = by_image(seen(config)), changed(config, augment=AugmentConfig(**knobs))
    first, second = by_image(seen(config, stop=4)), by_image(seen(config, start=4))
    assert first.keys() == second.keys()
    assert len(first.items() & second.items()) <= most_alike
    for epoch in (first, second):
        assert len(epoch.items() & plain.items()) <= most_plain


@pytest.mark.parametrize("size", [2, 3])
def test_all_see_the_same_from_memory_or_workers_from_any_step_on_any_rank(config, size):
    knobs = {"augment__flip": "alternating"} if size == 3 else mixed(mixup=0.4, cutmix=1.0)
    config = changed(config, data__batch_size=12, **knobs, **mixed(cutout=8))
    assert_all_see_the_same(config, size)


def assert_all_see_the_same(config, size):
    """From memory or from workers, from any step on, and on so many ranks, pixels are the same."""
    resident = seen(config)
    for where, workers in (("device", 0), ("host", 0), ("stream", 0), ("stream", 2)):
        assert seen(changed(config, data__where=where, data__workers=workers), 5) == resident[5:]
    ranks = run_ranks(size, seen, config)
    for step, expected in enumerate(resident):
        images, digests = zip(*(rank[step] for rank in ranks), strict=True)
        assert ([*chain(*images)], [*chain(*digests)]) == expected


def test_workers_crop_alike_and_nothing_crops_again(on_photos):
    config = changed(on_photos, augment__crop="resized", data__workers=0)
    assert seen(changed(config, data__workers=2)) == seen(config)
    with join_world(config.compute) as world:
        data, normalize, augment = opened(config, world)
        batch = next(data.batches(0, 1))
        assert torch.equal(augment(batch, 0)[0], normalize(batch.images))


def test_each_rank_drops_other_features_and_the_same_when_it_resumes():
    def drawn(step, rank):
        seeding.seed_layers(0, step, rank, torch.device("cpu"))
        return tuple(torch.rand(4).tolist())

    assert len({drawn(step, rank) for step in (0, 1) for rank in (0, 1)}) == 4
    assert drawn(1, 1) == drawn(1, 1)


def test_workers_mirror_images_as_the_option_says(on_photos):
    source = open_dataset(on_photos.data, "train")

    def mirrored(flip, *draws):
        crops = AugmentConfig(crop="resized", flip=flip)
        samples = Samples(source, on_photos.data, crops=crops)
        return [[samples.is_mirrored(0, epoch, draw) for epoch in range(4)] for draw in draws]

    assert mirrored("none", 0.4, 0.6) == [[False] * 4] * 2
    assert mirrored("random", 0.4, 0.6) == [[True] * 4, [False] * 4]
    (one,) = mirrored("alternating", 0.4)
    assert one in ([True, False] * 2, [False, True] * 2)


def test_the_seed_decides_which_images_are_mirrored_first():
    one, other = (sides_at(seed, 100) for seed in (0, 1))
    assert not torch.equal(one, other)
    assert 30 < one.sum() < 70
