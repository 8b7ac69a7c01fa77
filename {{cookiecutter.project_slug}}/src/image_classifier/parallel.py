"""How ranks train one model together: each has all weights, or what a tool says."""

import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from .checkpoints import Checkpoints
from .config import ComputeConfig, Config
from .extensions import functions
from .precision import Precision
from .runtime.distributed import World


class Replicas:
    """Every rank has all weights, and DDP averages their gradients; one rank alone has no DDP.

    Another way is a subclass, in the tool that has it.
    """

    checkpoints = Checkpoints
    has_all_weights = True  # of this rank

    def __init__(self, compute: ComputeConfig, world: World) -> None:
        """Of the ranks of `world`."""
        self.compute = compute
        self.world = world

    def shard(self, networks: Iterable[nn.Module], precision: Precision) -> None:
        """Let each rank keep its part of the weights, in place: here all of them."""

    def own(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """`optimizer`, which updates the weights that this rank has."""
        return optimizer

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model as it trains: wrapped by DDP, if there are other ranks, to average gradients.

        To share BatchNorm's statistics too: `nn.SyncBatchNorm.convert_sync_batchnorm(model)`, on
        GPUs. Not with `static_graph`, which fails with `no_sync` (pytorch/pytorch#187732).
        """
        if self.world.size == 1:
            return model
        # Of 1 x 1 convolutions in channels_last, whose strides are ambiguous, and nothing is wrong.
        # https://github.com/pytorch/pytorch/issues/47163
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
        devices = [self.world.device] if self.world.device.type == "cuda" else None
        ddp_model = DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)
        ddp_model.broadcast_buffers = False  # before each forward pass; evaluations do it
        if self.compute.gradient_dtype == "bf16":
            ddp_model.register_comm_hook(None, bf16_compress_hook)
        return ddp_model

    def whole(self, _: nn.Module) -> AbstractContextManager:
        """A block in which this rank has all weights of a model: any block."""
        return nullcontext()


def open_parallel(config: Config, world: World) -> Replicas:
    """DDP, unless a tool has another way.

    Raises:
        UserError: if a tool can't train as `config` says.
    """
    ways = (open_way(config, world) for open_way in functions("parallel", "open_parallel"))
    return next(filter(None, ways), Replicas(config.compute, world))


def choose_buckets(model: nn.Module, backward: Callable[[], object]) -> None:
    """Let DDP choose its buckets by a backward pass that leaves nothing else behind.

    It chooses them after the first one, in the order in which gradients came. Three ranks or more
    add up a gradient in an order that depends on its place there: a run that goes on from a
    checkpoint would round its first step differently.
    """
    buffers = [buffer.clone() for buffer in model.buffers()]
    backward()
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(before)
    model.zero_grad()
