"""Every knob of a run, on one page: the comment after a field, all of it, is its `--help` text.

A section is read only by the modules that its docstring names, and by `mistakes.py`. Start from a
preset (`presets.py`) and change what you need: `python train.py cifar10 --optim.lr 1.0`.
"""

import dataclasses
from dataclasses import dataclass, field
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


class UserError(ValueError):
    """A mistake that the user can mend; it is shown as one line, and the exit code is 2."""


class FaultError(RuntimeError):
    """Something that went wrong around the run, told in one line."""

    code = 1  # that the process exits with


@dataclass(frozen=True)
class DataConfig:
    """Which images.

    (`datasets/`, `loader.py`, `autotune.py`, `samples.py`, `bad_images.py`, and sizes by way of
    the properties in `config.py`)
    """

    name: str = "shapes"  # shapes, cifar10, cifar100, or folder: your own images
    root: str = "data"  # folder of the images: root/{train,val[,test]}/<class>/ or root/<class>/
    val_fraction: float = 0.2  # of the training images, where the folder has no `val` of its own
    cache: str = ""  # folder of what `prepare` wrote, which is read in place of the files; default:
    # ROOT.cache, beside `root`; off: read the files
    limit: int = 0  # use only so many images of each split, to try things out; 0: all
    image_size: int = 32  # side of the square that the model sees, in pixels
    test_size: int = 0  # and that it sees after training; 0: image_size. Random crops enlarge what
    # they show, so larger ones are better tested on: https://arxiv.org/abs/1906.06423
    batch_size: int = 512  # images per optimizer step, over all processes
    where: Literal["auto", "device", "host", "stream"] = "auto"  # images in device memory, in host
    # memory, or decoded anew for every batch; auto: device if they fit
    workers: int | Literal["auto"] = "auto"  # decoding processes per training process
    prefetch_batches: int = 4  # decoded ahead of the one that is in use
    on_bad_image: Literal["stop", "skip"] = "stop"  # a file that can't be read ends the run; skip:
    # the loss ignores it, and it is listed in bad_images.txt in the run folder
    balance: Literal["none", "sampling", "loss"] = "none"  # of classes that differ in size;
    # sampling: each is seen equally often; loss: images of rare ones count for more

    @property
    def eval_size(self) -> int:
        """The side in pixels of the images that a trained model is asked about."""
        return self.test_size or self.image_size

    @property
    def max_size(self) -> int:
        """The side in pixels of the largest images that the model sees."""
        return max(self.image_size, self.eval_size)


@dataclass(frozen=True)
class AugmentConfig:
    """What is done to training images, and how a test sees images.

    (`augment.py`, `samples.py`, `resolution.py`)
    """

    crop: Literal["none", "pad", "resized"] = "pad"  # shift by `pad`, or random resized crop
    pad: int = 4  # pixels of shift in each direction
    min_area: float = 0.35  # smallest share of the image that a resized crop may keep
    flip: Literal["none", "random", "alternating"] = "random"  # mirror half of the images;
    # alternating: those that were not mirrored in the epoch before
    policy: Literal["none", "randaugment", "trivialaugment"] = "none"  # streamed images only
    policy_ops: int = 2  # changes that randaugment makes to an image, one after the other
    policy_magnitude: int = 9  # strength of randaugment's changes, up to 30
    cutout: int = 0  # side of a square that is blanked, in pixels; 0: none
    erasing: float = 0.0  # share of the images in which a random rectangle is blanked
    mixup: float = 0.0  # alpha of the Beta distribution that blends pairs; 0: off
    cutmix: float = 0.0  # alpha of the Beta distribution of pasted boxes; 0: off
    min_size: int = 0  # side of training images at the start of a run, which then grow to
    # data.image_size; 0: no growth
    growth_begin: float = 0.7  # share of the run, in whole epochs, after which images grow
    growth_end: float = 0.85  # and after which they are of full size
    tta: Literal["none", "flip", "shift"] = "none"  # at test time, average the answers to an image
    # and its mirror image; shift: and to both moved by a pixel, 6 views in all


@dataclass(frozen=True)
class ModelConfig:
    """The network (`models/`)."""

    name: str = "resnet9"  # resnet9, airbench, airbench96, vit_s, or any of torchvision's, such as
    # resnet50; with timm installed, timm/NAME for any of those
    width: int = 64  # channels of the first layer (resnet9, airbench, airbench96)
    norm: Literal["batch", "group"] = "batch"  # group: does not depend on how a batch is divided
    # (resnet9 only)
    stem: Literal["auto", "imagenet", "small"] = "auto"  # first layers of torchvision's models;
    # small: keep full resolution; auto: small up to 64 pixels
    dropout: float = 0.0  # before the last layer
    stochastic_depth: float = 0.0  # probability that the last residual branch is left out, of an
    # image; of those before it, in proportion to their depth. 0: what the model comes with
    blurpool: bool = False  # blur before each strided convolution: https://arxiv.org/abs/1904.11486


@dataclass(frozen=True)
class OptimConfig:
    """How the weights move.

    (`optim.py`, `freeze.py`, `precision.py`, `state.py`, `loader.py`, `memory.py`)
    """

    name: Literal["sgd", "adamw", "muon"] = "sgd"  # sgd: with Nesterov momentum
    lr: float = 0.5  # peak learning rate, for `data.batch_size` as it stands
    momentum: float = 0.9  # beta1 for adamw
    weight_decay: float = 5e-4  # of matrices and filters; never of biases and norms
    schedule: Literal["cosine", "triangle"] = "cosine"  # how the learning rate falls to 0
    warmup_epochs: float = 1.0  # linear from 0 to `lr`
    label_smoothing: float = 0.0  # probability spread over all classes
    clip_norm: float = 0.0  # largest norm of all gradients together; 0: no clipping
    accumulate: int = 1  # parts that a batch is computed in, to save memory; BatchNorm takes its
    # statistics from one part at a time
    ema_decay: float = 0.0  # per step, of the averaged weights that are evaluated; 0: none
    frozen_epochs: float = 0.0  # in which only the last layer learns, on top of trained weights
    layer_decay: float = 1.0  # learning rate of a layer as a part of that of the one above it


@dataclass(frozen=True)
class ComputeConfig:
    """How the device is used (`distributed.py`, `precision.py`)."""

    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto: an accelerator if there is one
    channels_last: bool = True  # memory layout that convolutions are fastest in
    compile: bool = False  # torch.compile; pays back its first minute in longer runs
    tf32: bool = True  # let float32 matrix products on a GPU round their inputs to 19 bits
    cudnn_benchmark: bool = True  # try cuDNN's algorithms once and keep the fastest
    sync_batchnorm: bool = False  # batch statistics over all GPUs instead of each one's own


TrackerName = Literal["tensorboard", "wandb", "trackio"]


@dataclass(frozen=True)
class RunConfig:
    """Where a run lives, and what it writes when.

    (`launch.py`, `run.py`, `plan.py`, `checkpoint.py`, `pretrained.py`, `loader.py`, `report.py`,
    `train.py`)
    """

    dir: str = ""  # the run folder: the same command continues it; default: runs/<preset>
    processes: int | Literal["auto"] = "auto"  # one per GPU by default; any number on a CPU
    fresh: bool = False  # start over: what the run folder holds of an earlier run is deleted
    init_from: str = ""  # weights to start with: a checkpoint, a file of torchvision's, timm's or
    # .safetensors; pretrained: torchvision's for the model, downloaded
    log_every_steps: int = 50  # progress line and row in metrics.jsonl
    evaluate_every_epochs: float = 1.0  # on the validation images
    patience: int = 0  # evaluations without a better top-1, after which a run ends; 0: never
    save_every_steps: int = 0  # checkpoint; 0: only with every evaluation
    save_every_minutes: float = 10.0  # and whenever the last one is so old; 0: never for its age
    keep: int = 2  # newest checkpoints kept beside the best
    trackers: tuple[TrackerName, ...] = ("tensorboard",)  # who gets the metrics beside
    # metrics.jsonl; the flag with nothing after it: nobody
    on_nonfinite: Literal["stop", "skip"] = "stop"  # a loss that is inf or nan ends the run before
    # it spoils the weights; skip: the step does not count
    restarts: int = 3  # times that a run starts itself again, from its last save, after a process
    # of it was killed or ran out of memory
    timeout_seconds: float = 300.0  # without a sign of life from a process or a data worker


@dataclass(frozen=True)
class Config:
    """A run: its results are a function of this and of nothing else."""

    epochs: float = 10.0  # passes over the training images
    seed: int = 0  # of weights, order and augmentation
    deterministic: bool = False  # bit-identical runs on a GPU too; slower
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"  # auto: bf16 where it is fast
    profile: bool = False  # record a few steps with torch.profiler
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        """Refuse values that no run can have, before any work is done.

        Raises:
            UserError: if a value is out of range or contradicts another.
        """
        for knob, (low, high) in RANGES.items():
            value = knob_value(self, knob)
            if isinstance(value, int | float) and not low <= value <= high:
                raise out_of_range(knob, value, f"{low:g} .. {high:g}")
        if self.augment.policy != "none" and self.data.where in ("device", "host"):
            raise UserError(
                f"--augment.policy {self.augment.policy} works on single images, so they must be "
                f"streamed: --data.where auto or stream, not {self.data.where}"
            )
        if self.augment.crop == "pad" and self.augment.pad >= self.data.image_size:
            raise UserError(
                f"--augment.pad {self.augment.pad} is not less than "
                f"--data.image-size {self.data.image_size}"
            )
        check_sizes(self.data, self.augment)
        if self.optim.warmup_epochs > self.epochs:
            raise UserError(
                f"--optim.warmup-epochs {self.optim.warmup_epochs:g} is longer than the run: "
                f"--epochs {self.epochs:g}; about {0.2 * self.epochs:.1g} is usual"
            )
        if self.optim.frozen_epochs and not self.run.init_from:
            raise UserError(
                f"--optim.frozen-epochs {self.optim.frozen_epochs:g} keeps all layers but the last "
                "as they are, which must have learned something: --run.init-from FILE or pretrained"
            )
        if self.precision == "fp16" and self.compute.device == "cpu":
            raise UserError("--precision fp16 needs a GPU; on a CPU take bf16 or fp32")


SMALLEST_SIDE = 8  # pixels


def check_sizes(data: DataConfig, augment: AugmentConfig) -> None:
    """Refuse sizes of images that no run can have.

    Raises:
        UserError: naming the first.
    """
    if 0 < data.test_size < SMALLEST_SIDE:
        raise UserError(
            f"--data.test-size {data.test_size} is less than {SMALLEST_SIDE}; 0: --data.image-size"
        )
    if augment.min_size and not SMALLEST_SIDE <= augment.min_size <= data.image_size:
        raise UserError(
            f"--augment.min-size {augment.min_size} is not in {SMALLEST_SIDE} .. "
            f"{data.image_size}, which is --data.image-size; 0: images of one size"
        )
    if augment.growth_begin > augment.growth_end:
        raise UserError(
            f"--augment.growth-begin {augment.growth_begin:g} is later than "
            f"--augment.growth-end {augment.growth_end:g}"
        )


PREPARED_SIDE, PREPARED_QUALITY = 256, 85  # what `prepare` writes if it is not told otherwise
LARGE = 1e9
RANGES: dict[str, tuple[float, float]] = {
    "epochs": (1e-9, LARGE),
    "seed": (0, 2**63 - 1),
    "data.val_fraction": (0.001, 0.9),
    "data.limit": (0, LARGE),
    "data.image_size": (SMALLEST_SIDE, 4096),
    "data.test_size": (0, 4096),
    "data.batch_size": (1, LARGE),
    "data.workers": (0, 4096),
    "data.prefetch_batches": (1, 1000),
    "augment.pad": (0, 4096),
    "augment.min_area": (0.01, 1),
    "augment.policy_ops": (1, 10),
    "augment.policy_magnitude": (0, 30),
    "augment.cutout": (0, 4096),
    "augment.erasing": (0, 1),
    "augment.mixup": (0, 100),
    "augment.cutmix": (0, 100),
    "augment.min_size": (0, 4096),
    "augment.growth_begin": (0, 1),
    "augment.growth_end": (0, 1),
    "model.width": (8, 8192),
    "model.dropout": (0, 0.99),
    "model.stochastic_depth": (0, 0.99),
    "optim.lr": (0, LARGE),
    "optim.momentum": (0, 0.9999),
    "optim.weight_decay": (0, LARGE),
    "optim.warmup_epochs": (0, LARGE),
    "optim.label_smoothing": (0, 0.99),
    "optim.clip_norm": (0, LARGE),
    "optim.accumulate": (1, LARGE),
    "optim.ema_decay": (0, 0.999999),
    "optim.frozen_epochs": (0, LARGE),
    "optim.layer_decay": (0.01, 1),
    "run.processes": (1, 4096),
    "run.log_every_steps": (1, LARGE),
    "run.evaluate_every_epochs": (1e-9, LARGE),
    "run.patience": (0, LARGE),
    "run.save_every_steps": (0, LARGE),
    "run.save_every_minutes": (0, LARGE),
    "run.keep": (1, 1000),
    "run.restarts": (0, 1000),
    "run.timeout_seconds": (1, LARGE),
}
# A knob that cannot change what is learned may differ when a run is continued.
FREE_TO_CHANGE = ("run.", "compute.", "deterministic", "profile", "data.root", "data.where")
FREE_TO_CHANGE += ("data.workers", "data.prefetch_batches", "data.on_bad_image")
# The pixels of prepared images are others, but that is told from the images themselves.
FREE_TO_CHANGE += ("data.cache",)


def knob_value(config: Config, knob: str) -> Any:  # noqa: ANN401 - knobs have many types
    """The value of a knob by its dotted name, such as `optim.lr`."""
    value: Any = config
    for part in knob.split("."):
        value = getattr(value, part)
    return value


def flag(knob: str) -> str:
    """The knob as the command line has it: `optim.warmup_epochs` -> `optim.warmup-epochs`."""
    return knob.replace("_", "-")


def words_of(knobs: dict[str, Any]) -> list[str]:
    """Knobs as words of a command line: `{"optim.nesterov": False}` -> `--optim.no-nesterov`."""
    words = []
    for knob, value in knobs.items():
        section, dot, name = flag(knob).rpartition(".")
        if isinstance(value, bool):
            words.append(f"--{section}{dot}{'' if value else 'no-'}{name}")
        else:
            words += [f"--{flag(knob)}", *map(str, value if isinstance(value, tuple) else [value])]
    return words


def out_of_range(knob: str, value: float, allowed: str) -> UserError:
    """What to raise for a number that a knob can't have; an integer may be more than any float."""
    shown = f"{value:g}" if isinstance(value, float) else value
    return UserError(f"--{flag(knob)} {shown} is not in {allowed}")


def flatten(config: Config) -> dict[str, Any]:
    """Every knob by its dotted name, in the order of this page."""
    flat: dict[str, Any] = {}
    for name, value in dataclasses.asdict(config).items():
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            flat[name] = value
    return flat


@cache
def knob_kinds() -> dict[str, Any]:
    """The type of every knob by its dotted name."""
    kinds: dict[str, Any] = {}
    for name, kind in get_type_hints(Config).items():
        if dataclasses.is_dataclass(kind):
            kinds |= {f"{name}.{key}": inner for key, inner in get_type_hints(kind).items()}
        else:
            kinds[name] = kind
    return kinds


def unflatten(flat: dict[str, Any]) -> Config:
    """The config that `flatten` made `flat` from; knobs that are missing have their defaults.

    Raises:
        TypeError: if there is no such knob, or its value is of another kind.
        UserError: if a value is out of range.
    """
    values: dict[str, Any] = {}
    for knob, value in flat.items():
        section, _, name = knob.rpartition(".")
        known = tuple(value) if isinstance(value, list) else value  # JSON has no tuples
        if knob not in knob_kinds():
            raise TypeError(f"there is no --{flag(knob)}")
        if not fits(known, knob_kinds()[knob]):
            raise TypeError(f"--{flag(knob)} {value!a} is not of the right kind")
        (values.setdefault(section, {}) if section else values)[name] = known
    sections = {f.name: f.default_factory for f in dataclasses.fields(Config)}
    for name, value in values.items():
        if isinstance(value, dict):
            values[name] = sections[name](**value)
    return Config(**values)


def fits(value: Any, kind: Any) -> bool:  # noqa: ANN401 - knobs have many types
    """Whether a knob of type `kind` can have `value`; a file may hold anything."""
    if get_origin(kind) in (Union, UnionType):
        return any(fits(value, choice) for choice in get_args(kind))
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is tuple:  # of any length, all of one kind
        return type(value) is tuple and all(fits(one, get_args(kind)[0]) for one in value)
    return type(value) in ((int, float) if kind is float else (kind,))
