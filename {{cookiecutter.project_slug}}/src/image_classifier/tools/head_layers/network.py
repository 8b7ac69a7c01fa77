"""`--model.head layers`: the last layer sees features of several depths, not only the last.

After Head2Toe, https://arxiv.org/abs/2201.03529: frozen weights serve other kinds of images better
with what they make of them on the way. By hooks, so all other weights keep their names.
"""

from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from ...config import Config, ModelConfig
from ...errors import UserError
from ...models import find_head
from ...tracking import blank_logits
from ..stages.stages import find_modules

DEPTHS = 4  # of a network whose blocks all return features of one size: a vision transformer
TOKENS = 0  # in place of a size


def change_network(network: nn.Module, model: ModelConfig, image_size: int, channels: int) -> None:
    """Give `network` a new last layer, for mean and maximum of the features of several blocks.

    With `--model.head layers` only. Those are the last block of each size of features, or `DEPTHS`
    transformer blocks.

    Raises:
        UserError: if its last layer is not linear, or it has no such blocks.
    """
    if model.head == "last":
        return
    name, head = find_head(network)
    found = find_depths(network, image_size, channels)
    if not isinstance(head, nn.Linear) or not found:
        raise UserError(
            "--model.head layers needs a network of blocks with a linear last layer, which "
            f"{type(network).__name__} is not"
        )
    depths = Depths()
    width = 0
    for number, (block, shape) in enumerate(found):
        axis = channel_axis(shape)
        width += 2 * shape[axis]
        block.register_forward_hook(partial(depths.note, number, axis))
    last = nn.Linear(width, head.out_features, bias=head.bias is not None)
    last.register_forward_pre_hook(depths.join)
    network.set_submodule(name, last)


def change_training(network: nn.Module, config: Config, *_: object) -> None:
    """Freeze weights on which no logit depends: of a norm behind the last block.

    With `--model.head layers` only. Several ranks would wait for their gradients.
    """
    if config.model.head == "last":
        return
    images = config.data
    was_training = network.training
    weights = [weight for weight in network.parameters() if weight.requires_grad]
    with torch.enable_grad():
        logits = network.eval()(torch.zeros(1, images.channels, *[images.image_size] * 2))
        gradients = torch.autograd.grad(logits.sum(), weights, allow_unused=True)
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.requires_grad_(gradient is not None)
    network.train(was_training)


def this_thread() -> int:
    """The number of this thread; a graph that is compiled keeps nothing from call to call."""
    return 0 if torch.compiler.is_compiling() else get_ident()


class Depths:
    """What blocks return for the images of a batch, pooled, until the last layer takes it."""

    def __init__(self) -> None:
        self.pooled: dict[int, dict[int, Tensor]] = {}  # by thread, by number of the block

    def __deepcopy__(self, _: object) -> "Depths":
        """Those of a copied network: empty, as other threads may be at work with this one."""
        return Depths()

    def note(self, number: int, axis: int, *call: Any) -> None:  # noqa: ANN401 - of any block
        """Keep mean and maximum over all places of what block `number` returns."""
        places = call[2].movedim(axis, -1).flatten(1, -2)  # (batch, places, channels)
        # Not amax, whose gradient needs what the next layer may overwrite.
        pooled = torch.cat((places.mean(1), places.max(dim=1).values), dim=1)
        self.pooled.setdefault(this_thread(), {})[number] = pooled

    def join(self, _: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        """All that was kept, (batch, width), in place of the last layer's inputs.

        These are such features themselves where the last layer is called alone.
        """
        pooled = self.pooled.pop(this_thread(), {})
        return torch.cat([pooled[n] for n in sorted(pooled)], dim=1) if pooled else inputs[0]


def find_depths(
    network: nn.Module, image_size: int, channels: int
) -> list[tuple[nn.Module, torch.Size]]:
    """The blocks to take features of, in order, and the shapes of what they return."""
    parts = [(part, is_open) for part, is_open in find_modules(network) if any(part.children())]
    shapes: dict[nn.Module, torch.Size] = {}  # in the order in which they are done

    def note(part: nn.Module, _: object, output: object) -> None:
        shape = output.shape if isinstance(output, Tensor) else ()
        if len(shape) in (3, 4) and shape[0] == 1:
            shapes[part] = shape

    handles = [part.register_forward_hook(note) for part, _ in parts]
    try:
        blank_logits(network, image_size, channels)
    finally:
        for handle in handles:
            handle.remove()
    last_of = {size_of(shape): (part, shape) for part, shape in shapes.items()}
    if set(last_of) != {TOKENS}:
        return list(last_of.values())
    blocks = [(part, shapes[part]) for part, is_open in parts if part in shapes and not is_open]
    step = max(1, len(blocks) // DEPTHS)
    return blocks[::-1][::step][:DEPTHS][::-1]


def size_of(shape: torch.Size) -> int:
    """Number of places of features, or `TOKENS`."""
    return shape[1:].numel() // shape[channel_axis(shape)] if len(shape) == 4 else TOKENS


def channel_axis(shape: torch.Size) -> int:
    """Where the channels of features are: last in those of tokens, and of some transformers."""
    is_last = len(shape) == 3 or shape[1] == shape[2] != shape[3]
    return len(shape) - 1 if is_last else 1
