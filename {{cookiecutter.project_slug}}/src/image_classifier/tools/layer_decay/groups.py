"""A learning rate for each block of a network: lower ones, whose features are general, learn less.

https://arxiv.org/abs/1801.06146, https://arxiv.org/abs/2106.08254
"""

from typing import Any

from torch import nn

from ...config import OptimConfig
from ...models import find_heads, is_matrix
from ..stages.stages import find_modules

MOST_BLOCKS = 14  # a vision transformer's 12, what is before them, and the last layer


def change_groups(
    groups: list[dict[str, Any]], optim: OptimConfig, model: nn.Module
) -> list[dict[str, Any]]:
    """The groups of weights of an optimizer, each divided by blocks, from the first to the last."""
    if optim.layer_decay == 1:
        return groups
    blocks = find_blocks(model)
    found = []
    for above, block in zip(reversed(range(len(blocks))), blocks, strict=True):
        for group in groups:
            own = {*group["params"]}
            weights = [weight for weight in block if weight in own]
            found.append(group | {"params": weights, "lr_scale": optim.layer_decay**above})
    return found


def find_blocks(model: nn.Module) -> list[list[nn.Parameter]]:
    """The weights of each block, in order; the last is the last layer, with its siblings, alone.

    A block is an element of a sequence of layers, such as a residual or a transformer block. A norm
    belongs to the layer before it, tokens and positions to the first block. If there are more than
    MOST_BLOCKS, neighbors are merged, as in https://arxiv.org/abs/2201.03545.
    """
    heads = [weight for layer in find_heads(model) for weight in layer.parameters()]
    known = {id(weight) for weight in heads}
    tokens: list[nn.Parameter] = []
    body: list[list[nn.Parameter]] = []
    for part, is_open in find_modules(model):
        found = [w for w in part.parameters(recurse=not is_open) if id(w) not in known]
        known |= {id(weight) for weight in found}
        if is_open:
            tokens += found
        elif not body or (any(map(is_matrix, found)) and any(map(is_matrix, body[-1]))):
            body.append(found)
        else:
            body[-1] += found
    body[:1] = [tokens + weights for weights in body[:1]]
    count = min(len(body), MOST_BLOCKS - 1)
    together: list[list[nn.Parameter]] = [[] for _ in range(count)]
    for number, weights in enumerate(body):
        together[number * count // len(body)] += weights
    return [*together, heads]
