"""Gradient checkpointing: a block keeps only its inputs, and its backward pass computes the rest.

https://arxiv.org/abs/1604.06174
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from copy import copy
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ...config import Config
from ...errors import UserError
from ...models import find_head

SEQUENCES = (nn.Sequential, nn.ModuleList)
MOST_LAYERS = 8  # of a sequence of plain layers: to recompute a longer one needs as much memory


def change_training(model: nn.Module, config: Config, *_: object) -> None:
    """Let each block of `model` recompute its activations, with the option."""
    if config.compute.gradient_checkpointing:
        checkpoint_blocks(model)


def checkpoint_blocks(model: nn.Module) -> None:
    """Let each block of `model` recompute its activations; weights keep their names.

    In training only, with the same random numbers, gradients and statistics of BatchNorm.

    Raises:
        UserError: if it has no blocks.
    """
    _, head = find_head(model)
    blocks = [block for block in innermost_blocks(model) if head not in block.modules()]
    if not blocks:
        raise UserError(
            "--compute.gradient-checkpointing: the model has no blocks, such as residual or "
            "transformer blocks; a larger --optim.accumulate saves memory too"
        )
    for block in blocks:
        block.forward = partial(recomputed, block.forward)  # a copy of the model has its own


def recomputed(forward: MethodType, *inputs: Any, **options: Any) -> Any:  # noqa: ANN401 - a block's
    """`forward(*inputs, **options)`, which in training happens again in the backward pass."""
    block = forward.__self__
    if not block.training or not torch.is_grad_enabled():
        return forward(*inputs, **options)
    if torch.compiler.is_compiling():  # which writes to no buffer twice
        return checkpoint(forward, *inputs, use_reentrant=False, **options)
    kept = copies(inputs)
    given = iter([inputs])  # the first time

    def run(*_: Any, **more: Any) -> Any:  # noqa: ANN401
        return forward(*next(given, copies(kept)), **more)

    options["context_fn"] = lambda: (nullcontext(), spared_buffers(block))
    return checkpoint(run, *inputs, use_reentrant=False, **options)


def copies(inputs: Iterable[Any]) -> list[Any]:
    """Inputs whose lists a block may change: it may have put its output in the place of one."""
    return [copy(each) if isinstance(each, list | dict) else each for each in inputs]


@contextmanager
def spared_buffers(block: nn.Module) -> Iterator[None]:
    """Let the layers of `block` write to copies of their buffers, as BatchNorm its statistics."""
    kept = [(layer._buffers, dict(layer._buffers)) for layer in block.modules()]
    for buffers, originals in kept:
        buffers.update((name, b.clone()) for name, b in originals.items() if b is not None)
    try:
        yield
    finally:
        for buffers, originals in kept:
            buffers.update(originals)


def innermost_blocks(module: nn.Module, is_element: bool = False) -> Iterator[nn.Module]:
    """The innermost elements of sequences that have layers of their own, in order.

    Such as a residual block, a transformer block, a convolution with its norm and activation.
    """
    parts = list(module.children())
    composed = [part for part in parts if any(part.children())]
    if isinstance(module, SEQUENCES):
        if len(composed) > 1 or (composed and not is_element):
            for part in composed:
                yield from innermost_blocks(part, is_element=True)
        elif parts and len(parts) <= MOST_LAYERS:
            yield module
    # An element with a sequence of blocks inside, such as a stage, is opened; others are blocks.
    elif not is_element or any(map(holds_blocks, parts)):
        kinds = [type(part) for part in composed]
        for part in composed:  # siblings of one class are as good as a sequence
            yield from innermost_blocks(part, is_element=kinds.count(type(part)) > 1)
    elif parts:
        yield module


def holds_blocks(module: nn.Module) -> bool:
    """Whether a module is a sequence of two or more modules with layers, not mere sequences."""
    inner = [part for part in module.children() if any(part.children())]
    return isinstance(module, SEQUENCES) and sum(not isinstance(p, SEQUENCES) for p in inner) > 1
