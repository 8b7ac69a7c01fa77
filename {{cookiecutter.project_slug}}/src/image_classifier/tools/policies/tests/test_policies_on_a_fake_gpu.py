"""What policies ask of a GPU, on any machine: tensors that are together, and no hidden waits."""

import pytest
import test_fake_gpu
import torch
from conftest import changed, on_deep
from test_fake_gpu import GPU, augmented

from image_classifier.tools.policies import policy as policies

pytestmark = test_fake_gpu.pytestmark
gpu = test_fake_gpu.gpu  # a fixture


def test_policies_stay_on_the_device(gpu, config, satellite):
    config = changed(config, augment__policy="randaugment-m9-n1", augment__crop="pad")
    assert augmented(gpu, config).images.shape == (16, 3, 32, 32)
    deep = on_deep(config, satellite, 5, augment__policy="trivialaugment", augment__crop="pad")
    assert augmented(gpu, deep).images.shape == (8, 5, 32, 32)


@pytest.mark.parametrize(("channels", "dtype"), [(1, torch.uint8), (3, torch.uint8), (5, None)])
def test_every_operation_of_a_policy_stays_on_the_device(gpu, channels, dtype):
    numbers = [
        number
        for number, (operation, _) in enumerate(policies.OPERATIONS)
        if (operation is not policies.color or channels == 3)
        and (operation not in policies.OF_BYTES or dtype)
    ]
    which, images = torch.tensor(numbers), torch.zeros((len(numbers), 32, 32, channels), device=GPU)
    with gpu.waits(0):
        strengths = torch.full((len(which),), 0.5)
        found = policies.apply_grouped(images.to(dtype or images.dtype), which, strengths)
    assert found.shape == images.shape
