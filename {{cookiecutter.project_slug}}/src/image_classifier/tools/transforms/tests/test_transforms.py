"""Each image of a batch becomes what torchvision makes of it alone, or an exact symmetry."""

from itertools import product

import pytest
import torch
from conftest import changed, on_deep, run_ranks
from test_order import assert_all_see_the_same, by_image, seen
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.transforms.v2 import functional

from image_classifier.config import AugmentConfig
from image_classifier.tools.transforms import policy as policies
from image_classifier.tools.transforms.policy import (
    BLUR,
    FACTORS,
    FLIP,
    GRAY,
    NUM_DRAWS,
    ORDER,
    ORDERS,
    SIGMA,
    TURN,
    open_policy,
)

DRAW = torch.Generator().manual_seed(0)
NOISE = torch.randint(256, (6, 4, 7, 3), generator=DRAW)
# Smooth images with noise, of an odd side, and a flat one.
SMOOTH = torch.nn.functional.interpolate(NOISE.float().permute(0, 3, 1, 2), (47, 47))
IMAGES = (0.8 * SMOOTH.permute(0, 2, 3, 1) + 50 * torch.rand(6, 47, 47, 3, generator=DRAW)).byte()
IMAGES[1] = 77
EVERYTHING = {"vertical_flip": True, "turns": True, "jitter": 0.6, "grayscale": 0.3, "blur": 0.5}


def opened(channels=3, bits=8, **knobs):
    """What these options of augmentation do."""
    return open_policy(AugmentConfig(**knobs), channels, bits)


def middling(count):
    """Draws by which nothing but the order of colors is chosen, and all factors are 1."""
    draws = torch.full((count, NUM_DRAWS), 0.5)
    draws[:, [TURN, ORDER]] = 0.0
    draws[:, [GRAY, BLUR]] = 0.999
    return draws


def planar(images):
    """(count, height, width, channels) -> (count, channels, height, width), as torchvision's."""
    return images.permute(0, 3, 1, 2)


@pytest.mark.parametrize("knob", ["vertical_flip", "turns"])
@pytest.mark.parametrize(
    ("channels", "kind"),
    [(1, torch.uint8), (3, torch.uint8), (3, torch.float32), (5, torch.uint16), (64, torch.uint8)],
)
def test_flips_and_turns_are_exact_and_none_is_left_out(knob, channels, kind):
    images = torch.rand((400, 9, 9, channels), generator=DRAW).mul(250)
    images = images.to(kind) if kind != torch.uint16 else images.mul(257).int().to(kind)
    whole = images.clone()
    knobs = {"vertical_flip": True} if knob == "vertical_flip" else {"turns": True}
    found = opened(channels, 16 if kind == torch.uint16 else 8, **knobs)(
        images, torch.rand(400, NUM_DRAWS, generator=DRAW)
    )
    assert found.dtype == kind
    assert found.is_contiguous()
    assert torch.equal(images.float(), whole.float())
    numbers = images.float()
    known = {"as it is": numbers, "flipped": numbers.flip(1)}
    if knob == "turns":
        known = {turns: numbers.rot90(turns, (1, 2)) for turns in range(4)}
    counts = [sum(map(torch.equal, found.float(), other)) for other in known.values()]
    assert sum(counts) == 400
    assert min(counts) > 0.7 * 400 / len(known)


def test_flips_and_turns_together_are_the_eight_symmetries_of_a_square():
    images = torch.rand((800, 8, 8, 3), generator=DRAW)
    both = opened(vertical_flip=True, turns=True)
    found = both(images, torch.rand(800, NUM_DRAWS, generator=DRAW))
    counts = [
        sum(map(torch.equal, found, other.rot90(turns, (1, 2))))
        for other, turns in product((images, images.flip(1)), range(4))
    ]
    assert sum(counts) == 800
    assert min(counts) > 60


@pytest.mark.parametrize("kind", [torch.uint8, torch.uint16, torch.float32])
@pytest.mark.parametrize("channels", [1, 3, 5])
def test_small_images_are_moved_as_large_ones(kind, channels):
    images = torch.randint(256, (8, 9, 9, channels), generator=DRAW).to(kind)
    flags = torch.tensor([*product((False, True), repeat=3)]).T
    found = policies.symmetric_alone(images, flags)
    assert torch.equal(found.float(), policies.symmetric(images, *flags).float())
    assert found.is_contiguous()


def test_draws_say_which_symmetry():
    draws = middling(6)
    draws[:, FLIP] = torch.tensor([0.1, 0.9, 0.1, 0.9, 0.1, 0.9])
    draws[:, TURN] = torch.tensor([0.1, 0.3, 0.3, 0.6, 0.9, 0.9])
    found = opened(vertical_flip=True, turns=True)(IMAGES, draws)
    expected = [(1, 0), (0, 1), (1, 1), (0, 2), (1, 3), (0, 3)]
    for number, (is_flipped, turns) in enumerate(expected):
        image = IMAGES[number].flip(0) if is_flipped else IMAGES[number]
        assert torch.equal(found[number], image.rot90(turns, (0, 1)))


THEIRS = {
    policies.BRIGHTNESS: functional.adjust_brightness,
    policies.CONTRAST: functional.adjust_contrast,
    policies.SATURATION: functional.adjust_saturation,
}


@pytest.mark.parametrize("kind", THEIRS)
def test_brightness_contrast_and_saturation_are_torchvisions(kind):
    for draw in (0.01, 0.31, 0.5, 0.73, 0.97):
        draws = middling(6)
        draws[:, FACTORS][:, kind] = draw
        found = opened(jitter=0.8)(IMAGES, draws)
        factor = 1 + 0.8 * (2 * draw - 1)
        expected = THEIRS[kind](planar(IMAGES), factor).permute(0, 2, 3, 1)
        assert (found.int() - expected.int()).abs().max() <= 1
        assert (found != expected).float().mean() < 0.01


def test_colors_jitter_in_any_order():
    draws = middling(6)
    draws[:, ORDER] = torch.arange(6) / 6 + 0.01
    draws[:, FACTORS] = torch.tensor([0.9, 0.2, 0.7])
    found = opened(jitter=0.5)(IMAGES, draws)
    factors = 1 + 0.5 * (2 * draws[0, FACTORS] - 1)
    for number, order in enumerate(ORDERS.tolist()):
        image = IMAGES[number].permute(2, 0, 1)
        for kind in order:
            image = THEIRS[kind](image, factors[kind].item())
        difference = (found[number].int() - image.permute(1, 2, 0).int()).abs()
        assert difference.max() <= 3  # a level, times factors
        assert (difference > 0).float().mean() < 0.02
    assert len({*map(tuple, ORDERS.tolist())}) == 6


def test_factors_reach_as_far_as_the_strength():
    draws = middling(2)
    draws[:, FACTORS.start + policies.BRIGHTNESS] = torch.tensor([0.0, 1.0])
    images = torch.full((2, 8, 8, 3), 100, dtype=torch.uint8)
    assert opened(jitter=0.4)(images, draws)[:, 0, 0, 0].tolist() == [60, 140]
    assert opened(jitter=1.0)(images, draws)[:, 0, 0, 0].tolist() == [0, 200]


def test_a_gray_image_is_torchvisions():
    draws = middling(6)
    draws[::2, GRAY] = 0.29
    found = opened(grayscale=0.3)(IMAGES, draws)
    expected = functional.rgb_to_grayscale(planar(IMAGES), 3).permute(0, 2, 3, 1)
    assert (found[::2].int() - expected[::2].int()).abs().max() <= 1
    assert torch.equal(found[1::2], IMAGES[1::2])


@pytest.mark.parametrize(("side", "width"), [(8, 3), (47, 5), (100, 11)])
def test_a_blurred_image_is_torchvisions(side, width):
    images = torch.randint(256, (5, side, side, 2), generator=DRAW).byte()
    draws = middling(5)
    draws[1:, BLUR] = 0.1
    draws[:, SIGMA] = torch.tensor([0.5, 0.0, 0.3, 0.6, 1.0])
    found = opened(channels=2, blur=0.2)(images, draws)
    assert torch.equal(found[0], images[0])
    for number, sigma in enumerate((0.1, 0.67, 1.24, 2.0), start=1):
        expected = functional.gaussian_blur(images[number].permute(2, 0, 1), width, sigma)
        difference = (found[number].int() - expected.permute(1, 2, 0).int()).abs()
        assert difference.max() <= 1
        assert (difference > 0).float().mean() < 0.001


def test_a_blur_that_fails_leaves_the_precision_of_other_products():
    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, operation, _, words=(), knobs=None):
            if operation is torch.ops.aten.bmm.default:
                found.append(torch.get_float32_matmul_precision())
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return operation(*words, **(knobs or {}))

    found = []
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")  # as `Precision` does
    kernels = policies.gaussians(torch.tensor([0.5]), 9)
    try:
        with Products(), pytest.raises(torch.OutOfMemoryError):
            policies.blur(torch.zeros(1, 1, 9, 9), kernels)
        assert (found, torch.get_float32_matmul_precision()) == (["highest"], "high")
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("knob", EVERYTHING)
def test_sixteen_bits_are_changed_as_eight(knob):
    draws = torch.rand(6, NUM_DRAWS, generator=DRAW)
    images = IMAGES // 2 + 20
    deep = (images.int() * 257).to(torch.uint16)
    found = opened(bits=16, **{knob: EVERYTHING[knob]})(deep, draws)
    expected = opened(**{knob: EVERYTHING[knob]})(images, draws)
    rounded = 1 + 1.6 + 1.6**2 if knob == "jitter" else 1  # down, and times the next factor
    assert (found.float() / 257 - expected.float()).abs().max() < rounded + 0.1
    assert torch.equal(found.float(), found.float().round())
    bright = torch.full((1, 8, 8, 3), 60_000).to(torch.uint16)
    draws = middling(1)
    draws[:, FACTORS] = 1.0
    assert opened(bits=16, jitter=0.5)(bright, draws).unique().tolist() == [65_535]


def test_a_float_image_is_rounded_whether_it_is_changed_or_not():
    draws = middling(6)
    for chosen in (0, 1):  # images
        draws[:chosen, GRAY] = 0.0
        found = opened(grayscale=0.5)(IMAGES.float() - 0.4, draws)
        assert found.dtype == torch.uint8
        assert torch.equal(found[chosen:], IMAGES[chosen:])


@pytest.mark.parametrize("side", [16, 100, 301])  # many images at once, or one, or less
@pytest.mark.parametrize("bits", [8, 16])
def test_an_image_is_changed_alike_in_any_part_of_a_batch(side, bits):
    kind = torch.uint8 if bits == 8 else torch.uint16
    images = torch.randint(2**bits, (13, side, side, 3), generator=DRAW).to(kind)
    draws = torch.rand(13, NUM_DRAWS, generator=DRAW)
    change = opened(bits=bits, **EVERYTHING)
    whole = change(images, draws)
    parts = [change(images[part], draws[part]) for part in (slice(0, 5), slice(5, 6), slice(6, 13))]
    assert torch.equal(whole, torch.cat(parts))


def test_an_option_changes_nothing_of_what_another_draws():
    draws = torch.rand(6, NUM_DRAWS, generator=DRAW)
    moved = opened(turns=True, vertical_flip=True)(IMAGES, draws)
    gray = opened(grayscale=0.5)(moved, draws)
    both = opened(turns=True, vertical_flip=True, grayscale=0.5)(IMAGES, draws)
    assert torch.equal(both, gray)


def test_without_options_there_is_nothing_to_do():
    assert opened() is None
    for knob, value in EVERYTHING.items():
        assert opened(**{knob: value}) is not None


@pytest.mark.parametrize(("size", "where"), [(2, "all"), (3, "one")])
def test_all_see_the_same_from_memory_or_workers_from_any_step_on_any_rank(config, size, where):
    knobs = EVERYTHING if where == "all" else {"turns": True}
    config = changed(config, data__batch_size=12, augment=AugmentConfig(**knobs))
    assert_all_see_the_same(config, size)


def test_many_channels_of_16_bits_are_turned_alike_on_two_ranks(config, satellite):
    config = on_deep(config, satellite, 5, data__where="stream", data__workers=0)
    knobs = {"vertical_flip": True, "turns": True, "blur": 0.5, "crop": "resized"}
    config = changed(config, augment=AugmentConfig(**knobs))
    alone = seen(config, stop=2)
    first, second = run_ranks(2, seen, config, 0, 2)
    for whole, one, other in zip(alone, first, second, strict=True):
        assert whole[0] == one[0] + other[0]
        assert whole[1] == one[1] + other[1]


def test_each_epoch_changes_images_anew(config):
    plain = AugmentConfig(crop="none", flip="none")
    config = changed(config, data__workers=0, augment=plain)
    as_they_are = by_image(seen(config))
    config = changed(config, augment__turns=True, augment__vertical_flip=True)
    first, second = by_image(seen(config, stop=4)), by_image(seen(config, start=4))
    assert first.keys() == second.keys()
    for one, other in ((first, second), (first, as_they_are), (second, as_they_are)):
        assert len(one.items() & other.items()) <= 20  # of 64: an eighth have the same symmetry


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--augment.jitter 1.5", "--augment.jitter 1.5 is not in 0 .. 1"),
        ("--augment.grayscale -0.1", "--augment.grayscale -0.1 is not in 0 .. 1"),
        ("--augment.blur 2", "--augment.blur 2 is not in 0 .. 1"),
        ("--augment.jitter 0.4 --data.channels 1", "--data.channels is 1: --augment.jitter 0"),
        ("--augment.grayscale 0.2 --data.channels 5", "--data.channels is 5: --augment.grayscale"),
    ],
)
def test_a_value_that_there_can_not_be_is_refused_in_one_line(words, said, refusal):
    assert said in refusal("train", "smoke", *words.replace(" -0.1", "=-0.1").split())
