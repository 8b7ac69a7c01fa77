"""Random numbers: a draw depends on where in the run it is made, never on what came before.

Each draw takes a new generator, seeded by a key such as (seed, epoch, index). So any number of
workers and ranks draws the same, and a run resumes from any step with no generator state in its
checkpoint. The first word of a key, the purpose, keeps draws for different purposes independent.
"""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Purposes. Their numbers are part of every run: a change would change all results.
WEIGHTS, ORDER, SAMPLE, BATCH, LAYERS, DATASET = 1, 2, 3, 4, 5, 7

MASK = 2**64 - 1
SPARES: list[np.random.MT19937] = []  # for `seeded`: seeding one is 60 x faster than making it


def hash64(*key: int | np.ndarray) -> int | np.ndarray:
    """A 64-bit number in which every bit of every word of `key` counts (SplitMix64's finalizer).

    From the first word on that is an array of uint64, an array. https://doi.org/10.1145/2714064.2660195
    """
    state: int | np.ndarray = 0
    for word in key:
        state = (state + word + 0x9E3779B97F4A7C15) & MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
        state ^= state >> 31
    return state


def draws_at(*key: int, indices: np.ndarray, count: int) -> np.ndarray:
    """Uniform draws from 0 to 1 for each of `indices`: (len(indices), count) float32.

    Those for an image depend on `key` and its index alone: `hash64(*key, index, number) / 2**64`.
    All at once, as a generator for each would take longer than to crop the image.
    """
    words = indices[:, None].astype(np.uint64), np.arange(count, dtype=np.uint64)
    return (hash64(*key, *words) >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)


def seed_at(*key: int) -> int:
    """A seed for torch's generators; the CPU's uses only the low 32 bits."""
    return hash64(*key) & 0xFFFFFFFF


def generator_at(*key: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator whose draws depend on `key` and the kind of device alone.

    On CUDA, draws of many numbers at once (from about 40,000 on a T4, from 230,000 on an H100) also
    depend on the model of the GPU: https://github.com/pytorch/pytorch/issues/196613
    """
    return torch.Generator(device).manual_seed(seed_at(*key))


def order_at(seed: int, epoch: int, count: int) -> Tensor:
    """The order in which an epoch visits `count` images: (count,) int64, same on every rank."""
    return torch.randperm(count, generator=generator_at(ORDER, seed, epoch))


def images_of(numbers: Any, count: int) -> Any:  # noqa: ANN401 - of torch or NumPy
    """The images that an order of an epoch names, of `count` images.

    An image that an epoch repeats is `i`, `i + count`, `i + 2 * count`: each time cropped anew.
    """
    return numbers % count


def sides_at(seed: int, count: int) -> Tensor:
    """Which of `count` images are mirrored in even epochs if flips alternate: (count,) bool.

    In odd epochs the others are: https://arxiv.org/abs/2404.00498
    """
    return torch.rand(count, generator=generator_at(SAMPLE, seed)) < 0.5


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    """A block in which draws from the CPU's global generators depend on `key` alone.

    torchvision's transforms draw from torch's generator, other libraries from those of `random`
    and NumPy too. Afterwards all continue as before, but for a normal draw that NumPy had spare.
    """
    state = torch.default_generator.get_state()
    python_state = random.getstate()
    # Copying NumPy's state and putting it back takes 70 us; swapping its generator 0.5.
    numpy_bits = np.random.get_bit_generator()
    spare = SPARES.pop() if SPARES else np.random.MT19937(0)
    np.random.set_bit_generator(spare)
    seed_cpu(seed_at(*key))
    try:
        yield
    finally:
        torch.default_generator.set_state(state)
        random.setstate(python_state)
        np.random.set_bit_generator(numpy_bits)
        SPARES.append(spare)


def seed_cpu(value: int) -> None:
    """Seed the global generators of torch on the CPU, of `random` and of NumPy."""
    # `torch.manual_seed` would walk all devices: 20 x slower.
    torch.default_generator.manual_seed(value)
    random.seed(value)
    np.random.seed(value)


def seed_layers(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Seed what torch draws in a step, differently on each rank: dropout and other layers."""
    value = seed_at(LAYERS, seed, step, rank)
    torch.default_generator.manual_seed(value)
    if (kind := device.type) == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(value)
    elif kind == "mps":
        torch.mps.manual_seed(value)


def seed_everything(seed: int, deterministic: bool, device: torch.device) -> str:
    """Seed the global generators, choose kernels; return a line on how reproducible the run is."""
    torch.manual_seed(seed_at(WEIGHTS, seed))  # on all devices
    seed_cpu(seed_at(WEIGHTS, seed))
    if deterministic != torch.are_deterministic_algorithms_enabled():  # by a run before
        torch.use_deterministic_algorithms(deterministic)  # which imports torch's compiler
    if deterministic:
        # cuBLAS reads this when its first handle is made.
        # https://docs.nvidia.com/cuda/cublas/#results-reproducibility
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
        # Filling new tensors makes reads before writes repeatable: nothing here reads so.
        torch.utils.deterministic.fill_uninitialized_memory = False
    exact = "reproducible bit for bit on this"
    if device.type == "cpu":
        level = f"{exact} CPU type with the same number of threads and processes"
    elif deterministic:
        level = f"{exact} GPU type with the same number of processes"
    else:
        level = "same images, on one GPU type same pixels; exact numbers need --deterministic"
    return f"seed {seed}: {level}"
