"""The blocks of any network, in the order in which images pass through them."""

from collections.abc import Iterator

from torch import nn

MOST_BLOCKS = 14  # a vision transformer's 12, what is before them, and the last layer


def find_head(model: nn.Module) -> tuple[str, nn.Module]:
    """Name and layer of the last linear layer or, in networks that end so, 1 x 1 convolution."""
    layers = [pair for pair in model.named_modules() if isinstance(pair[1], nn.Linear | nn.Conv2d)]
    return layers[-1]


def find_blocks(model: nn.Module, most: int = MOST_BLOCKS) -> list[list[nn.Parameter]]:
    """The weights of each block from the first to the last, which is the last layer alone.

    A block is what stands in a sequence of layers: a residual block, a transformer's. A norm
    belongs to the layer before it; tokens and positions to the first block. Where there are more
    than `most`, neighbours are taken together, as in https://arxiv.org/abs/2201.03545.
    """
    _, head = find_head(model)
    known = {id(weight) for weight in head.parameters()}
    tokens: list[nn.Parameter] = []
    body: list[list[nn.Parameter]] = []
    for part, is_open in parts(model):
        found = [w for w in part.parameters(recurse=not is_open) if id(w) not in known]
        known |= {id(weight) for weight in found}
        if is_open:
            tokens += found
        elif not body or (has_matrix(found) and has_matrix(body[-1])):
            body.append(found)
        else:
            body[-1] += found
    body[:1] = [tokens + weights for weights in body[:1]]
    count = min(len(body), most - 1)
    together: list[list[nn.Parameter]] = [[] for _ in range(count)]
    for number, weights in enumerate(body):
        together[number * count // len(body)] += weights
    return [*together, list(head.parameters())]


def parts(module: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """The parts of a network in order, and whether the parts of that one follow."""
    yield module, True
    for child in module.children():
        if is_stack(child):
            yield from parts(child)
        else:
            yield child, False


def is_stack(module: nn.Module) -> bool:
    """Whether a module is a sequence of layers, or is built around one of layers of one kind."""
    sequences = nn.Sequential | nn.ModuleList
    return isinstance(module, sequences) or any(
        isinstance(child, sequences) and len(child) > 1 and len(set(map(type, child))) == 1
        for child in module.children()
    )


def has_matrix(weights: list[nn.Parameter]) -> bool:
    """Whether there is more than norms and biases."""
    return any(weight.ndim > 1 for weight in weights)
