"""Named experiments. To add one: a function that returns a `Config`, and its name in `PRESETS`.

The first line of its docstring says what it reaches, where and in how long, and is shown by
`--help`. Derive one from another with `dataclasses.replace`.
"""

from collections.abc import Callable
from dataclasses import replace

from .config import AugmentConfig, Config, DataConfig, ModelConfig, OptimConfig, RunConfig


def smoke() -> Config:
    """Seconds on any CPU: whether everything works."""
    return Config(
        epochs=3,
        precision="fp32",
        data=DataConfig(batch_size=96, limit=960),
        model=ModelConfig(width=8, norm="group"),
        optim=OptimConfig(lr=0.02),
        run=RunConfig(log_every_steps=5),
    )


def shapes() -> Config:
    """The drawn shapes that come with this project."""
    return Config(
        epochs=5,
        data=DataConfig(batch_size=256),
        model=ModelConfig(width=32),
        optim=OptimConfig(lr=0.3, schedule="triangle", warmup_epochs=1, label_smoothing=0.1),
    )


def cifar10() -> Config:
    """CIFAR-10."""
    return Config(
        epochs=30,
        data=DataConfig(name="cifar10"),
        augment=AugmentConfig(cutout=8),
        optim=OptimConfig(
            lr=0.5, schedule="triangle", warmup_epochs=5, label_smoothing=0.1, ema_decay=0.998
        ),
    )


def cifar10_speed() -> Config:
    """CIFAR-10 by airbench's recipe, in 8 epochs: 91.0 % after 7:08 on 2 cores, from JPEGs."""
    return Config(
        epochs=8,
        data=DataConfig(name="cifar10", batch_size=2000),
        augment=AugmentConfig(pad=2, flip="alternating", tta="shift"),
        model=ModelConfig(name="airbench"),
        optim=OptimConfig(
            name="muon",
            lr=0.025,
            momentum=0.6,
            # Before a norm only the direction of filters counts. Steps lengthen them and decay
            # shortens them, until a step turns them by sqrt(2 lr weight_decay), whatever their
            # size: https://arxiv.org/abs/2305.17212
            weight_decay=1.2,
            schedule="triangle",
            warmup_epochs=0,
            label_smoothing=0.2,
        ),
        run=RunConfig(log_every_steps=25, evaluate_every_epochs=8),
    )


def cifar100() -> Config:
    """CIFAR-100, as `cifar10`."""
    same = cifar10()
    return replace(same, data=replace(same.data, name="cifar100"))


def folder() -> Config:
    """Your own photographs, from scratch: `--data.root FOLDER`."""
    return Config(
        epochs=30,
        data=DataConfig(name="folder", image_size=128, batch_size=64),
        augment=AugmentConfig(crop="resized"),
        model=ModelConfig(name="resnet18"),
        optim=OptimConfig(
            name="adamw", lr=1e-3, weight_decay=0.05, warmup_epochs=2, label_smoothing=0.1
        ),
        run=RunConfig(log_every_steps=10),
    )


def finetune() -> Config:
    """Your own photographs, from trained weights: `--data.root FOLDER [--run.init-from FILE]`."""
    return Config(
        epochs=20,
        data=DataConfig(name="folder", image_size=224, batch_size=32),
        # Smaller boxes than of half the image lose what a few hundred photographs show.
        augment=AugmentConfig(crop="resized", min_area=0.5, policy="trivialaugment"),
        model=ModelConfig(name="resnet18"),
        optim=OptimConfig(
            name="adamw",
            lr=5e-4,
            weight_decay=0.05,
            warmup_epochs=1,
            label_smoothing=0.1,
            ema_decay=0.99,
            frozen_epochs=1,  # https://arxiv.org/abs/2202.10054
            layer_decay=0.75,  # https://arxiv.org/abs/2106.08254
        ),
        run=RunConfig(init_from="pretrained", patience=6, log_every_steps=10),
    )


PRESETS: dict[str, Callable[[], Config]] = {
    preset.__name__: preset
    for preset in (smoke, shapes, cifar10, cifar10_speed, cifar100, folder, finetune)
}
