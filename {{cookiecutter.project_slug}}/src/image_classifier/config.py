"""Every knob of a run, on one page: the comment after a field, all of it, is its `--help` text.

Start from a preset (`presets.py`), and change what you need: `train.py shapes --optim.lr 0.3`.
To add a knob: a field with its comment; a number also has its range, `within(default, low, high)`.
Tools bring more, of the same sections: `tools/<name>/options.py`.
"""

from dataclasses import dataclass, field, fields
from typing import Literal

from .errors import OF_TOOLS, UserError, choose
from .extensions import PLACES, check_ranges, find_tools, functions, paths_of, section, within
from .extensions.options import out_of_range

SMALLEST_SIDE = 8  # pixels
OPTIMIZERS = ("sgd", "adamw", *paths_of("optimizer"))


@section("images")
@dataclass(frozen=True)
class ImagesConfig:
    """Which images."""

    name: str = "shapes"  # shapes; folder: your own images; or a tool's dataset
    root: str = "data"  # folder of the images: root/{train,val[,test]}/<class>/ or root/<class>/;
    # with some tools, a URL
    val_fraction: float = within(0.2, 0.001, 0.9)  # share of the training images for validation, if
    # the folder has no `val` of its own
    fold: int = within(0, 0, 999)  # which of the 1 / val_fraction equal parts of the training
    # images is for validation
    cache: str = ""  # folder for features and prepared images, which are read instead of the files;
    # default: ROOT.cache, beside `root`; off: read the files
    channels: int = within(3, 1, 64)  # of an image: 3: red, green and blue; 1: gray; others as
    # TIFF or `.npy` files have them
    bits: Literal[8, 16] = 8  # of each value in memory; other files are converted


@section("data")
@dataclass(frozen=True)
class DataConfig(ImagesConfig):
    """Which images, and how they are loaded."""

    limit: int = within(0, 0)  # use only this many images of each split, to try things out; 0: all
    fit: Literal["crop", "squash", "pad"] = "crop"  # how an image becomes square where training
    # cuts no random crop. crop: its middle; squash: all of it, distorted; pad: all of it, with bars
    # of the mean color
    image_size: int = within(32, SMALLEST_SIDE, 4096)  # side of the square training images, in
    # pixels
    test_size: int = within(0, 0, 4096)  # side of the images in evaluation; 0: image_size. Random
    # crops enlarge objects, so larger test images are better: https://arxiv.org/abs/1906.06423
    batch_size: int = within(512, 1)  # images per optimizer step, over all processes
    where: Literal["auto", "device", "host", "stream"] = "auto"  # device: all images in GPU memory;
    # host: in CPU memory; stream: decoded for every batch; auto: device if they fit
    workers: int | Literal["auto"] = within("auto", 0, 4096)  # DataLoader workers per process;
    # auto: measured
    prefetch_batches: int = within(4, 1, 1000)  # batches decoded ahead

    @property
    def eval_size(self) -> int:
        """Side in pixels of the images in evaluation."""
        return self.test_size or self.image_size

    @property
    def max_size(self) -> int:
        """Side in pixels of the largest images that the model sees."""
        return max(self.image_size, self.eval_size)


@section("augment")
@dataclass(frozen=True)
class AugmentConfig:
    """How training images are augmented, and which views evaluation averages."""

    crop: Literal["none", "pad", "resized"] = "pad"  # pad: random shift by up to 1/8 of the side;
    # resized: random resized crop
    min_scale: float = within(0.35, 0.01, 1)  # smallest share of the image that a random resized
    # crop keeps
    flip: Literal["none", "random", "alternating"] = "random"  # horizontal flip; alternating: the
    # images that were not flipped in the epoch before, https://arxiv.org/abs/2404.00498
    tta: Literal["none", "flip", "shift"] = "none"  # test-time augmentation: average predictions
    # over an image and its mirror image; shift: also moved by one pixel, 6 views in all


@section("model")
@dataclass(frozen=True)
class ModelConfig:
    """The network."""

    name: str = "resnet9"  # resnet9, resnet9_gn (GroupNorm), a tool's, torchvision's such as
    # resnet50, or LIBRARY/NAME of another library. For images of up to 64 pixels, the first layers
    # of their networks keep full resolution if the rest of the network can take it
    width: int = within(64, 8, 8192)  # channels of the first layer (resnet9, some tools' networks)
    dropout: float = within(0.0, 0, 0.99)  # before the last layer, beside a network's own
    drop_path: float = within(0.0, 0, 0.9)  # stochastic depth: share of images that skip the last
    # block; fewer skip the blocks below; 0: that of the library. For some networks of torchvision,
    # tools and other libraries: https://arxiv.org/abs/1603.09382
    task: Literal["single-label", "multi-label"] = "single-label"  # whether an image has exactly
    # one of the classes, or any number of them


@section("optim")
@dataclass(frozen=True)
class OptimConfig:
    """Loss, optimizer and learning-rate schedule."""

    name: str = "sgd"  # sgd: with Nesterov momentum; adamw; or that of a tool
    lr: float = within(0.5, 0)  # peak learning rate, for the given data.batch_size
    momentum: float = within(0.9, 0, 0.9999)  # momentum, or beta1 of AdamW
    weight_decay: float = within(5e-4, 0)  # of weight matrices and filters; never of biases, norms
    schedule: Literal["cosine", "linear"] = "cosine"  # how the learning rate falls to 0
    warmup_epochs: float = within(1.0, 0)  # length of the linear warm-up
    label_smoothing: float = within(0.0, 0, 0.99)  # probability spread over all classes; for
    # multi-label, over yes and no
    clip_norm: float = within(0.0, 0)  # gradient clipping by global norm; 0: off
    accumulate: int = within(1, 1)  # gradient accumulation: micro-batches per batch. BatchNorm
    # takes its statistics from each micro-batch
    ema_decay: float = within(0.0, 0, 0.999999)  # decay per step of the weights' moving average
    # (EMA), which is evaluated; 0: off
    freeze_bn: bool = False  # BatchNorm keeps its statistics, those of pretrained weights:
    # batches of a few images would spoil them


@section("compute")
@dataclass(frozen=True)
class ComputeConfig:
    """How the device is used."""

    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto: an accelerator if there is one
    channels_last: bool = True  # memory layout in which convolutions are fastest
    compile: bool = False  # torch.compile; pays back its first minute in longer runs
    gradient_dtype: Literal["fp32", "bf16"] = "fp32"  # format of exchanged gradients; bf16: for
    # slow networks, half the bytes, and gradients are rounded to 8 bits


@section("run")
@dataclass(frozen=True)
class RunConfig:
    """Where a run lives, and what it writes when."""

    dir: str = ""  # run folder: the same command resumes from it; default: runs/<preset>
    processes: int | Literal["auto"] = within("auto", 1, 4096)  # one per GPU by default; any number
    # on a CPU
    fresh: bool = False  # start over: delete what the run folder holds of an earlier run
    init_from: str = ""  # weights to start from: a run folder or checkpoint, or a file of
    # torchvision's, timm's or .safetensors; pretrained: what the model's library has, downloaded
    log_every_steps: int = within(50, 1)  # steps between rows of metrics.jsonl; slow runs print
    # lines more often
    evaluate_every_epochs: float = within(1.0, 1e-9)  # epochs between evaluations; a checkpoint
    # follows each evaluation, and every 10 minutes without one
    best_by: str = "auto"  # metric that decides which weights best.pt has, and when patience
    # ends the run: any of metrics/table.py; auto: top1, or average_precision
    # for multi-label
    patience: int = within(0, 0)  # early stopping: evaluations without a better `best_by`; 0: off
    trackers: tuple[str, ...] = ("auto",)  # where metrics go beside metrics.jsonl: tools such as
    # wandb; auto: tensorboard, if it is there; the flag without a name: nowhere
    max_minutes: float = within(0.0, 0)  # time limit, from the start of the command: the run saves
    # and ends with exit code 75, and the same command resumes it; 0: none
    timeout_seconds: float = within(300.0, 1)  # the run stops after so long without a sign of life
    # from a process or a worker


@section("")
@dataclass(frozen=True)
class Config:
    """A run: its results are a function of this, and of the `precision` that `auto` finds."""

    epochs: float = within(10.0, 0)  # passes over the training images; 0: a linear probe, which
    # only fits the last layer to the features of pretrained weights
    seed: int = within(0, 0, 2**63 - 1)  # for initial weights, order and augmentation
    deterministic: bool = False  # bit-identical runs on a GPU too; slower
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"  # auto: the fastest that is safe
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        """Raise `UserError`, before any work, for what is out of range or contradicts another."""
        check_ranges(self)
        optim = self.optim
        size = self.data.test_size
        if 0 < size < SMALLEST_SIDE:
            raise out_of_range("data.test_size", size, f"{SMALLEST_SIDE} .. 4096; 0: off")
        choose("optimizer", optim.name, dict.fromkeys(OPTIMIZERS), OF_TOOLS)
        for check in functions("options", "check"):
            check(self)
        if optim.warmup_epochs > self.epochs > 0:
            raise UserError(
                f"--optim.warmup-epochs {optim.warmup_epochs:g} is longer than the run: "
                f"--epochs {self.epochs:g}; about {0.2 * self.epochs:.1g} is usual"
            )
        if self.epochs == 0 and not self.run.init_from:
            raise UserError(
                "--epochs 0 trains only the last layer, on top of pretrained weights: "
                "--run.init-from FILE or pretrained"
            )


# Knobs that cannot change what is learned may differ when a run is resumed. Those of `prepared`
# images change pixels, which the fingerprint of the images tells.
FREE_TO_CHANGE = ("run.", "compute.", "deterministic", "data.root", "data.where", "data.workers")
FREE_TO_CHANGE += ("data.prefetch_batches", "data.cache")
for _tool in find_tools("options").values():
    FREE_TO_CHANGE += _tool.FREE_TO_CHANGE
    if unknown := _tool.SECTIONS.keys() - {"", *PLACES, *(knob.name for knob in fields(Config))}:
        raise ValueError(f"{_tool.__name__} names sections that are not there: {sorted(unknown)}")
