"""The parts of any network, found by how its layers are nested."""

from collections.abc import Iterator

from torch import nn


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
