"""Each operation of a policy does to each image of a batch what torchvision's does to it alone."""

from functools import partial

import numpy as np
import pytest
import torch
from test_launches import Operations
from torch.nn import functional
from torchvision import transforms
from torchvision.transforms import v2

from image_classifier.tools.policies import policy as policies

NOISE = np.random.default_rng(0)
META = torch.device("meta")  # tensors without numbers: what runs for them is what runs on a GPU
MOVE = torch.ops.aten._to_copy.default


@pytest.mark.parametrize("number", range(14))
def test_an_operation_does_what_torchvisions_does(number):
    noise = torch.randint(256, (5, 3, 12, 12), generator=torch.Generator().manual_seed(1)).byte()
    images = functional.interpolate(noise, (47, 47), mode="bilinear")
    images[1], images[2] = 77, images[2] // 3 + 40
    name, (space, _) = [*v2.TrivialAugmentWide._AUGMENTATION_SPACE.items()][number]
    nearest = transforms.InterpolationMode.NEAREST  # torchvision 0.26 does not know its name
    theirs = v2.TrivialAugmentWide()._apply_image_or_video_transform
    theirs = partial(theirs, fill={}, interpolation=nearest)
    pixels, which = images.permute(0, 2, 3, 1).contiguous(), torch.full((5,), number)
    signs = [1.0, -1.0, 1.0, -1.0, 1.0] if policies.SIGNED[number] else [1.0] * 5
    for magnitude in [0.0] if space(31, 47, 47) is None else space(31, 47, 47).tolist():
        strengths = [sign * magnitude for sign in signs]
        pairs = zip(images, strengths, strict=True)
        expected = torch.stack([theirs(image, name, strength) for image, strength in pairs])
        ours = policies.apply_grouped(pixels, which, torch.tensor(strengths)).permute(0, 3, 1, 2)
        difference = (ours.int() - expected.int()).abs()
        # Colors may be rounded otherwise; so may places half way between two pixels.
        assert (difference > 1).float().mean() < 0.003
        assert (difference > 0).float().mean() < 0.01


@pytest.mark.parametrize("is_trivial", [True, False])
@pytest.mark.parametrize(
    ("channels", "bits", "side"),
    [(3, 8, 32), (3, 8, 47), (1, 8, 32), (5, 8, 32), (3, 16, 32), (5, 16, 33)],
)
def test_the_functions_of_a_gpu_change_pixels_as_those_of_a_cpu(channels, bits, side, is_trivial):
    draw = torch.Generator().manual_seed(0)
    numbers = policies.Policy("trivialaugment", channels, bits).allowed
    images = torch.randint(2**bits, (len(numbers) * 9, side, side, channels), generator=draw)
    images = images.byte() if bits == 8 else images.float()
    which = numbers.repeat(9)
    bins = torch.randint(31, which.shape, generator=draw)
    magnitudes = policies.magnitude_table(is_trivial, side)[which, bins]
    is_negative = torch.tensor(policies.SIGNED)[which] & (bins % 2 == 0)
    magnitudes = torch.where(is_negative, -magnitudes, magnitudes)
    theirs = policies.apply_grouped(images.clone(), which, magnitudes)
    ours = policies.apply_at_once(images.clone(), which, magnitudes)
    difference = (ours.int() - theirs.int()).abs()
    # Of 65,535 the last may be rounded otherwise, as on some processors it is.
    allowed = 0 if bits == 8 else 1
    assert [n for n in numbers if difference[which == n].max() > allowed] == []


@pytest.mark.parametrize(("cached", "large"), [(2000, 2**17), (2**19, 0)])
def test_images_are_changed_alike_however_many_a_cpu_works_on_at_once(cached, large, monkeypatch):
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(256, (60, 16, 16, 3), generator=draw).byte()
    which, strength = torch.randint(14, (60,), generator=draw), torch.linspace(0.1, 0.9, 60)
    together = policies.apply_grouped(images.clone(), which, strength)
    monkeypatch.setattr(policies, "CACHED", cached)
    monkeypatch.setattr(policies, "LARGE", large)
    assert torch.equal(policies.apply_grouped(images.clone(), which, strength), together)


@pytest.mark.parametrize("number", range(14))
def test_an_operation_treats_all_channels_and_16_bits_alike(number):
    operation, _ = policies.OPERATIONS[number]
    images = torch.from_numpy(NOISE.integers(40, 180, size=(3, 16, 16, 3), dtype=np.uint8))
    which, strength = torch.tensor([number] * 3), torch.tensor([0.3, 0.2, 0.25])

    def apply(images):
        return policies.apply_grouped(images.clone(), which, strength)

    if operation not in (policies.color, policies.contrast):  # whose gray is another
        assert torch.equal(apply(images.repeat(1, 1, 1, 2)), apply(images).repeat(1, 1, 1, 2))
    if operation not in policies.OF_BYTES:
        deep = apply(images.float() * 257) / 257
        assert (deep - apply(images).float()).abs().max() < 1.1  # rounded


@pytest.mark.parametrize(
    ("name", "most", "rounds"), [("trivialaugment", 134, 1), ("randaugment", 268, 2)]
)
def test_a_policy_launches_few_operations_and_copies_its_draws_once_a_round(name, most, rounds):
    policy = policies.Policy(name)
    images = torch.empty((1000, 32, 32, 3), dtype=torch.uint8, device=META)
    draws = torch.rand((1000, policy.num_draws), generator=torch.Generator().manual_seed(0))
    policy(images, draws)  # the first time makes a table
    with Operations() as found:
        policy(images, draws)
    assert sum(device == META for *_, device in found.calls) <= most
    moves = [knobs for operation, knobs, _ in found.calls if operation is MOVE]
    copies = [knobs for knobs in moves if knobs.get("device") == META]
    assert len(copies) == rounds
    # Only CUDA keeps the memory until then: https://github.com/pytorch/pytorch/issues/189690
    assert not any(knobs.get("non_blocking") for knobs in copies)
