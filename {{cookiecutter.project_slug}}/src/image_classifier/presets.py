"""Named experiments. To add one: a function that returns a `Config`, and its name in `PRESETS`.

The first line of its docstring says what it reaches, where and in how long, and is shown by
`--help`. Derive one from another with `dataclasses.replace`. Tools bring presets, too, and change
those that are here.
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
        model=ModelConfig(name="resnet9_gn", width=8),
        optim=OptimConfig(lr=0.02),
        run=RunConfig(log_every_steps=5),
    )


def shapes() -> Config:
    """Shapes that are drawn on the spot: 98.5 % after 0:55 on 2 cores, with airbench."""
    # ResNet-9, which airbench replaces where the tool that has it is there.
    return Config(
        epochs=3,
        data=DataConfig(batch_size=256),
        model=ModelConfig(width=24),
        optim=OptimConfig(
            lr=0.5,
            momentum=0.85,
            weight_decay=1e-3,
            schedule="linear",
            warmup_epochs=0.6,
            label_smoothing=0.1,
        ),
    )


def folder() -> Config:
    """Your own photographs, from scratch: `--data.root FOLDER`."""
    # For some hundreds of images, soon known by heart: no two looks at one may be alike. Tools that
    # are there bring mixup, a policy and another optimizer: see `train.py folder --help`.
    return Config(
        epochs=100,
        data=DataConfig(name="folder", image_size=128, batch_size=64),
        augment=AugmentConfig(crop="resized"),
        model=ModelConfig(name="resnet18"),
        optim=OptimConfig(
            name="adamw",
            lr=1e-3,
            weight_decay=0.1,
            warmup_epochs=3,
            label_smoothing=0.1,
            ema_decay=0.99,
        ),
        run=RunConfig(log_every_steps=10),
    )


def finetune() -> Config:
    """Your own photographs, from pretrained weights: `--data.root FOLDER`."""
    # Begins with a linear probe, and lower layers learn more slowly, where the tools are there. For
    # some hundreds of images: small batches, for many small steps, in which BatchNorm has no
    # statistics of its own.
    return Config(
        epochs=8,
        data=DataConfig(name="folder", image_size=224, batch_size=16),
        augment=AugmentConfig(crop="resized"),
        model=ModelConfig(name="resnet18"),
        optim=OptimConfig(
            name="adamw",
            lr=4e-4,
            weight_decay=0.05,
            warmup_epochs=0.5,
            label_smoothing=0.1,
            freeze_bn=True,
        ),
        run=RunConfig(init_from="pretrained", log_every_steps=10),
    )


PRESETS: dict[str, Callable[[], Config]] = {
    preset.__name__: preset for preset in (smoke, shapes, folder, finetune)
}


def shortened(config: Config, epochs: float) -> Config:
    """A preset for a run of `epochs`: what it counts in epochs shrinks where it is made for more.

    `epochs` itself stays as it is: it is what the user says.
    """
    if not 0 < epochs < config.epochs:
        return config
    share = epochs / config.epochs
    optim = config.optim
    run = config.run
    warmup = round(optim.warmup_epochs * share, 6)
    # Of a preset that evaluates every epoch, a shorter run does so too, and not more often.
    every = min(max(1.0, round(run.evaluate_every_epochs * share, 6)), run.evaluate_every_epochs)
    return replace(
        config,
        optim=replace(optim, warmup_epochs=warmup),
        run=replace(run, evaluate_every_epochs=every),
    )
