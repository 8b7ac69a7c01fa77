"""What a network costs: weights, operations, and the memory that a step needs for each image.

Found with tensors that have a shape and no contents, so nothing is computed and no random number
is drawn.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..augment import build_size
from ..config import Config
from ..precision import Precision
from ..runtime.printable import printable

NUM_IMAGES = 2  # one would not do for BatchNorm in training
# A gradient for the inputs of a layer and one for its weights cost a forward pass each.
TRAINING_PASSES = 3


@dataclass(frozen=True)
class Cost:
    """Of a network in training; `flops` and `activation_bytes` are None if `reason` says why."""

    weights: int
    trainable: int  # of them
    flops: int | None = None  # of the forward pass of an image; an addition is one, too
    activation_bytes: int | None = None  # of an image, kept from the forward to the backward pass
    reason: str = ""

    @property
    def training_flops(self) -> int | None:
        """Operations that an image costs in training."""
        return None if self.flops is None else TRAINING_PASSES * self.flops

    def phrase(self, micro_batch: int) -> str:
        """In words, where so many images are computed with at once."""
        if self.flops is None or self.activation_bytes is None:
            return f"operations and activations of {self.reason}"
        memory = self.activation_bytes
        return (
            f"an image: {amount(self.flops)}FLOP forward, {amount(self.training_flops)}FLOP in "
            f"training, {amount(memory)}B of activations ({amount(memory * micro_batch)}B for "
            f"{micro_batch} at once)"
        )


COSTS: dict[tuple, Cost] = {}  # of networks that were looked at in this process


def build_effort(config: Config, steps_per_epoch: int, total_steps: int) -> Callable[[int], float]:
    """The share of an image's `training_flops` that a step takes, as a function of the step.

    Less than 1 while images are small, in proportion to their area, and while all layers but the
    last are frozen, which then have no backward pass.
    """
    full_size = config.data.image_size
    size_at = build_size(config.augment, full_size, steps_per_epoch, total_steps)
    thaw_step = round(config.optim.frozen_epochs * steps_per_epoch)

    def effort_at(step: int) -> float:
        passes = 1 if step < thaw_step else TRAINING_PASSES
        return (size_at(step) / full_size) ** 2 * passes / TRAINING_PASSES

    return effort_at


def cost_of(
    model: nn.Module,
    image_size: int,
    precision: Precision,
    frozen: Sequence[nn.Parameter] = (),
) -> Cost:
    """What `model` costs with square images of `image_size` pixels.

    `frozen` weights, which rest at first, count as if they learned: memory must do for that.
    """
    learning = learning_weights(model, frozen)
    weights = tuple((tuple(w.shape), id(w) in learning) for w in model.parameters())
    key = (repr(model), weights, image_size, precision.name, precision.device.type)
    if key not in COSTS:
        COSTS[key] = look(model, image_size, precision, learning)
    return COSTS[key]


def learning_weights(model: nn.Module, frozen: Sequence[nn.Parameter]) -> set[int]:
    """The weights of `model` that learn, now or when `frozen` ones do, by `id`."""
    return {id(w) for w in model.parameters() if w.requires_grad} | set(map(id, frozen))


def look(model: nn.Module, image_size: int, precision: Precision, learning: set[int]) -> Cost:
    """The cost of `model`, from a forward pass over tensors without contents."""
    weights = sum(weight.numel() for weight in model.parameters())
    trainable = sum(weight.numel() for weight in model.parameters() if id(weight) in learning)
    try:
        flops, kept = count(model, image_size, precision, learning)
    except Exception as error:  # a network of somebody's, and an operation that needs contents
        reason = printable((str(error) or type(error).__name__).splitlines()[0])
        return Cost(weights, trainable, reason=f"{type(model).__name__} are not known: {reason}")
    return Cost(weights, trainable, flops // NUM_IMAGES, kept // NUM_IMAGES)


def count(
    model: nn.Module, image_size: int, precision: Precision, learning: set[int]
) -> tuple[int, int]:
    """Operations, and bytes kept for the backward pass, of a few images."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    # A copy of a weight in 16 bits is kept too, but once for all images.
    shapes = {tuple(sorted(tensor.shape)) for tensor in tensors.values()}
    kept: dict[int, tuple[int, Tensor]] = {}  # bytes by storage; the tensor keeps its number taken

    def keep(tensor: Tensor) -> Tensor:
        if tuple(sorted(tensor.shape)) not in shapes:
            storage = tensor.untyped_storage()
            kept[storage._cdata] = storage.nbytes(), tensor
        return tensor

    without_contents = FakeTensorMode()
    fakes = {f"model.{name}": without_contents.from_tensor(t) for name, t in tensors.items()}
    for name, tensor in tensors.items():
        fakes[f"model.{name}"].requires_grad_(id(tensor) in learning)
    with without_contents:
        size = (NUM_IMAGES, 3, image_size, image_size)
        images = torch.empty(size, device=precision.device).to(
            memory_format=precision.memory_format
        )
    counter = FlopCounterMode(display=False)
    with (
        without_contents,
        counter,
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        mixed(precision),
    ):
        torch.func.functional_call(Bare(model), fakes, (images,))
    return counter.get_total_flops(), sum(size for size, _ in kept.values())


class Bare(nn.Module):
    """A network without what it was compiled to."""

    def __init__(self, model: nn.Module) -> None:
        """Of `model`, which is not copied."""
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """What its Python says."""
        return self.model.forward(images)


def mixed(precision: Precision) -> AbstractContextManager:
    """A block in the number format of the run."""
    if precision.dtype == torch.float32:
        return nullcontext()
    return torch.autocast(precision.device.type, precision.dtype)


def amount(number: float) -> str:
    """A number in three digits or so, and what it is thousands of: 3627132928 -> `3.63 G`."""
    letters = ["", "k", "M", "G", "T", "P"]
    while number >= 999.5 and len(letters) > 1:
        number /= 1000
        del letters[0]
    return f"{number:.3g} {letters[0]}"
