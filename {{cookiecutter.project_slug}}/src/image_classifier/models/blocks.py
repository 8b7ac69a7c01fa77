"""The matrices and the head of any network: for weight decay, dropout, and tools."""

from fnmatch import fnmatchcase

from torch import nn
from torch.nn.functional import dropout

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
    """The last layer and its siblings: timm's distilled transformers, and VOLO, have two heads."""
    _, last = find_head(model)
    declared = model.get_classifier() if hasattr(model, "get_classifier") else ()
    parts = list(declared) if isinstance(declared, tuple) else [declared]
    listed = (getattr(model, "pretrained_cfg", None) or {}).get("classifier") or ()
    listed = (listed,) if isinstance(listed, str) else listed
    parts += [layer for name, layer in model.named_modules() if name in listed]
    layers = [layer for part in parts for layer in part.modules()]
    beside = [layer for layer in layers if isinstance(layer, nn.Linear | nn.Conv2d)]
    siblings = [layer for layer in beside if len(layer.weight) == len(last.weight)]
    return list(dict.fromkeys([last, *siblings]))


def drop_before_head(network: nn.Module, probability: float) -> None:
    """Put dropout before the last layer and its siblings, in hooks: weights keep their names."""
    for head in find_heads(network):
        head.register_forward_pre_hook(lambda layer, x: dropout(x[0], probability, layer.training))
