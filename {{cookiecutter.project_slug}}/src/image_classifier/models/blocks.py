"""The matrices, head and blocks of any network: for weight decay, dropout, layer decay."""

from collections.abc import Iterator
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.functional import dropout

MOST_BLOCKS = 14  # a vision transformer's 12, what is before them, and the last layer
# Tables, parameters without a layer, and norms over several dimensions.
NO_MATRICES = (nn.Embedding, nn.ParameterList, nn.ParameterDict, nn.LayerNorm, nn.RMSNorm)


def find_matrices(model: nn.Module) -> dict[nn.Parameter, nn.Module]:
    """The matrices and filters of a network, in order, and the layer that each belongs to.

    Not biases, norms and scales, which are one-dimensional in effect, nor embeddings: tables, and
    parameters outside of layers (positions, tokens). timm's models name more of these, or patterns,
    in `no_weight_decay()`.
    """
    matrices: dict[nn.Parameter, nn.Module] = {}
    listed: list[str] = []
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        listed += [prefix + name for name in getattr(module, "no_weight_decay", tuple)()]
        is_layer = not list(module.children()) or isinstance(module, nn.MultiheadAttention)
        if not is_layer or isinstance(module, NO_MATRICES):
            continue
        for name, weight in module.named_parameters(recurse=False):
            is_listed = any(fnmatchcase(prefix + name, pattern) for pattern in listed)
            if is_matrix(weight) and "bias" not in name and not is_listed:
                matrices[weight] = module
    return matrices


def is_matrix(weight: nn.Parameter) -> bool:
    """Whether it has several rows (outputs) and several columns."""
    return weight.ndim > 1 and weight.shape[0] > 1 and weight.shape[1:].numel() > 1


def find_head(model: nn.Module) -> tuple[str, nn.Module]:
    """Name and layer of the last linear layer or, in networks that end so, 1 x 1 convolution."""
    layers = [pair for pair in model.named_modules() if isinstance(pair[1], nn.Linear | nn.Conv2d)]
    return layers[-1]


def begin_at_zero(model: nn.Module) -> None:
    """Zero the last layer and its siblings; not a convolution, whose ReLU would never learn."""
    for head in find_heads(model):
        for weight in head.parameters() if isinstance(head, nn.Linear) else ():
            nn.init.zeros_(weight)


def find_heads(model: nn.Module) -> list[nn.Module]:
    """The last layer and its siblings: timm's distilled transformers have two heads."""
    _, last = find_head(model)
    declared = model.get_classifier() if hasattr(model, "get_classifier") else ()
    parts = declared if isinstance(declared, tuple) else (declared,)
    layers = [layer for part in parts for layer in part.modules()]
    beside = [layer for layer in layers if isinstance(layer, nn.Linear | nn.Conv2d)]
    return [last, *(layer for layer in beside if len(layer.weight) == len(last.weight))]


def drop_before_head(network: nn.Module, probability: float) -> None:
    """Put dropout before the last layer, in a hook: weights keep their names."""
    _, head = find_head(network)
    head.register_forward_pre_hook(lambda layer, x: dropout(x[0], probability, layer.training))


def find_blocks(model: nn.Module) -> list[list[nn.Parameter]]:
    """The weights of each block, in order; the last block is the last layer alone.

    A block is an element of a sequence of layers, such as a residual or a transformer block. A norm
    belongs to the layer before it, tokens and positions to the first block. If there are more than
    MOST_BLOCKS, neighbors are merged, as in https://arxiv.org/abs/2201.03545.
    """
    _, head = find_head(model)
    known = {id(weight) for weight in head.parameters()}
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
    return [*together, list(head.parameters())]


def find_modules(module: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """The modules of a network in order, and whether the children of that one follow."""
    yield module, True
    for child in module.children():
        if is_stack(child):
            yield from find_modules(child)
        else:
            yield child, False


def is_stack(module: nn.Module) -> bool:
    """Whether a module is a sequence of layers, or contains one of layers of a single type."""
    sequences = nn.Sequential | nn.ModuleList
    return isinstance(module, sequences) or any(
        isinstance(child, sequences) and len(child) > 1 and len(set(map(type, child))) == 1
        for child in module.children()
    )
