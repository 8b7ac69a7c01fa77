"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009): 50,000 training and 10,000 test images, 32 x 32."""

import torch

from ...config import DataConfig
from ...data import Source, check_own
from ...errors import UserError

Color = tuple[float, float, float]


def cifar10(data: DataConfig, split: str) -> Source:
    """CIFAR-10: 10 classes."""
    return read_batches("CIFAR10", data, split, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


def cifar100(data: DataConfig, split: str) -> Source:
    """CIFAR-100: 100 classes."""
    return read_batches("CIFAR100", data, split, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))


def read_batches(name: str, data: DataConfig, split: str, mean: Color, std: Color) -> Source:
    """The copy in `data.root`, or else a download of 160 MB to there; both by torchvision.

    torchvision unpickles the files, but only after it found their MD5 sums to be the published.

    Raises:
        UserError: if there is no copy, and it can't be downloaded or written.
    """
    from torchvision import datasets

    check_own({"val": "test", "test": "test"}, data.root, data, split)
    dataset = getattr(datasets, name)
    try:
        images = dataset(data.root, train=split == "train", download=True)
    except (OSError, RuntimeError) as error:  # no network, no space, no right to write
        reason = getattr(error, "reason", None) or error
        raise UserError(
            f"cannot download {name} to {data.root!a}: {reason}; "
            f"put {dataset.filename} there, or see --data.root"
        ) from error
    return Source(
        labels=torch.tensor(images.targets),
        classes=tuple(images.classes),
        pixels=torch.from_numpy(images.data),
        mean=mean,
        std=std,
        is_test=split != "train",  # there are no validation images
    )


DATASETS = {"cifar10": cifar10, "cifar100": cifar100}
