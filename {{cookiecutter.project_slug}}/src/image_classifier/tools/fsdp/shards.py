"""FSDP: each rank keeps a part of every weight, of its gradient and of the optimizer's state.

This is PyTorch's FSDP2 (https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html):
all ranks gather the weights of a block before it computes and free them after it, and each gets its
part of the mean gradient. The parameters are `DTensor`s, of which `to_local()` is a rank's part.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm

from ...config import ComputeConfig
from ...parallel import Replicas
from ...precision import Precision
from ...runtime.distributed import World, local_part
from ..stages.stages import find_modules
from .checkpoints import ShardedCheckpoints

LARGE_LAYER = 1_000_000  # weights of a single layer that is worth an exchange of its own
NORMS = (_BatchNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


class Shards(Replicas):
    """Every rank has a part of each weight; the parts of a block are gathered as it computes."""

    checkpoints = ShardedCheckpoints
    has_all_weights = False

    def __init__(self, _: ComputeConfig, world: World) -> None:
        """Over the ranks of `world`."""
        self.world = world

    def shard(self, networks: Iterable[nn.Module], precision: Precision) -> None:
        """Keep this rank's part of the weights of each of `networks`."""
        for network in networks:
            shard(network, precision, self.world)

    def own(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """`optimizer`, which updates this rank's parts."""
        step_on_parts(optimizer)
        return optimizer

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model as it is: FSDP averages gradients by itself."""
        return model

    def whole(self, model: nn.Module) -> AbstractContextManager[None]:
        """A block in which this rank has all weights of `model`."""
        return whole(model)


def shard(model: nn.Module, precision: Precision, world: World) -> None:
    """Shard the weights of `model` over all ranks, in place.

    Each block is gathered by itself; what is outside of blocks stays whole from the forward pass to
    the end of the backward pass. In bf16, weights are gathered in bf16 but for those of norms, and
    gradients are averaged in float32; autocast decides on the arithmetic, as without FSDP.
    """
    model.to(memory_format=torch.contiguous_format)  # FSDP takes no other
    mesh = init_device_mesh(world.device.type, (world.size,))
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if precision.dtype == torch.bfloat16:
        norms = [n for n in model.modules() if isinstance(n, NORMS) and list(n.parameters())]
        if norms:
            fully_shard(norms, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for block in find_units(model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def find_units(model: nn.Module) -> list[nn.Module]:
    """The modules whose weights are gathered together: blocks, and large layers.

    Weights that several of them share are gathered with the whole network.
    """
    names = Counter(w for _, w in model.named_parameters(remove_duplicate=False))
    parts = [part for part, is_open in find_modules(model) if not is_open]
    parts = [part for part in parts if all(names[weight] == 1 for weight in part.parameters())]
    sizes = [sum(weight.numel() for weight in part.parameters()) for part in parts]
    return [
        part
        for part, size in zip(parts, sizes, strict=True)
        if size >= LARGE_LAYER or (size and list(part.children()))
    ]


def step_on_parts(optimizer: torch.optim.Optimizer) -> None:
    """Have `optimizer` update each rank's part of the weights.

    That is exact where an update is elementwise, and the fused kernels take no `DTensor`s. Only a
    step sees the parts: FSDP may move them. Between steps, `optimizer` knows the weights.
    """
    step = optimizer.step
    for values in optimizer.state.values():
        values |= {name: local_part(value) for name, value in values.items()}

    @torch.no_grad()
    def sharded_step(closure: None = None) -> None:
        groups = optimizer.param_groups
        state = optimizer.state
        weights = [group["params"] for group in groups]
        parts = {w: w.to_local() for w in chain(*weights) if w.grad is not None}
        for weight, part in parts.items():
            part.grad = weight.grad.to_local()
        for group in groups:
            group["params"] = [parts[w] for w in group["params"] if w in parts]
        optimizer.state = defaultdict(dict, {part: state[w] for w, part in parts.items()})
        step(closure)
        optimizer.state = state
        for group, whole_weights in zip(groups, weights, strict=True):
            group["params"] = whole_weights
        for part in parts.values():
            part.grad = None

    optimizer.step = sharded_step


@contextmanager
def whole(model: nn.Module) -> Iterator[None]:
    """A block in which every rank has all weights of `model`, and needs no other rank to use it.

    In an evaluation ranks have different numbers of batches.
    """
    units = find_units(model)
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
    for module in sharded:
        module.unshard()
    yield
    for unit in units:
        unit.set_reshard_after_forward(True, recurse=False)
    for module in sharded:
        module.reshard()
