"""ResNet-50 on two devices: the first half of its layers on one, the second half on the other.

    python docs/examples/model_parallel.py --micro-batches 4
    torchrun --nproc-per-node 2 docs/examples/model_parallel.py --pipeline --micro-batches 4

The first command has both devices in one process: `cuda:0` and `cuda:1`, or without two GPUs the
CPU twice, which shows that it works and gains nothing. The second has a process for each device,
and torch.distributed.pipelining between them. When to use either: docs/model_parallel.md.
"""

import argparse
import sys
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

# The code beside this folder, also where nothing or another copy of it is installed.
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from image_classifier.augment import build_augment
from image_classifier.config import Config, ModelConfig
from image_classifier.data import Augmented, TrainData
from image_classifier.optim import (
    build_optimizer,
    build_schedule,
    set_lr,
)
from image_classifier.precision import Precision
from image_classifier.preprocess import Normalize
from image_classifier.presets import smoke
from image_classifier.runtime.distributed import World, join_world
from image_classifier.tasks import Loss, build_loss
from image_classifier.train import init_model, train_step

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
FIRST_LAYER = "layer3"  # of the second half, which has 56 % of the operations of ResNet-50


def halves(model: nn.Module) -> list[nn.Sequential]:
    """The two halves of one of torchvision's ResNets, made of its own layers.

    Weights keep their names: the state dicts of both halves together are that of the model.
    """
    layers = OrderedDict(model.named_children())
    layers = OrderedDict([*layers.items()][:-1]) | {"flatten": nn.Flatten(), "fc": layers["fc"]}
    cut = [*layers].index(FIRST_LAYER)
    parts = [*layers.items()][:cut], [*layers.items()][cut:]
    return [nn.Sequential(OrderedDict(part)) for part in parts]


class Split(nn.Module):
    """A network with its halves on two devices of one process; it returns logits on the second.

    In `train.py`, `Split(init_model(...), devices)` replaces
    `self.precision.place(init_model(...))`, and the second device is `world.device`: there labels
    and loss are.
    """

    def __init__(
        self, model: nn.Module, devices: list[torch.device], micro_batches: int = 1
    ) -> None:
        """Move each half to its device."""
        super().__init__()
        self.devices, self.micro_batches = devices, micro_batches
        self.first, self.second = map(nn.Module.to, halves(model), devices)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 3, height, width) -> (batch, num_classes).

        On GPUs nothing here waits: the first begins a micro-batch while the second computes the one
        before it. autograd runs their backward passes side by side, too.
        """
        first, second = self.devices
        parts = images.to(first).chunk(self.micro_batches)
        return torch.cat([self.second(self.first(part).to(second)) for part in parts])


def pipeline_step(
    model: nn.Module,
    world: World,
    loss_fn: Loss,
    schedule: str,
    micro_batches: int,
) -> tuple[nn.Sequential, Callable[[Tensor, Tensor], Tensor | None]]:
    """This rank's half, and a function of images and labels that adds up its gradients.

    The function returns the loss on the second rank, and None on the first. `loss_fn` is a
    micro-batch's share of the loss of the batch, so nothing is divided by their number.
    """
    half = halves(model)[world.rank].to(world.device)
    # Only contiguous tensors can be sent, and activations and their gradients are channels_last.
    if world.is_main:
        half.register_forward_hook(lambda _, __, features: features.contiguous())
    else:
        half.register_forward_pre_hook(send_contiguous_gradient)
    stage = PipelineStage(half, world.rank, world.size, world.device)

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        return loss_fn.of(logits, Augmented(None, labels))  # which needs no images

    run = SCHEDULES[schedule](stage, micro_batches, loss_fn=loss_of, scale_grads=False)

    def step(images: Tensor, labels: Tensor) -> Tensor | None:
        if world.is_main:
            run.step(images)
            return None
        losses: list[Tensor] = []
        run.step(target=labels, losses=losses)
        return torch.stack(losses).sum().detach()

    return half, step


def send_contiguous_gradient(_: nn.Module, inputs: tuple[Tensor]) -> None:
    """Let the gradient of a half's input be contiguous."""
    if inputs[0].requires_grad:
        inputs[0].register_hook(Tensor.contiguous)


def main() -> None:
    """Train for some steps, and print the loss of each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pipeline", action="store_true", help="a process for each device")
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help="of --pipeline")
    parser.add_argument("--micro-batches", type=int, default=4, help="of which a batch consists")
    parser.add_argument("--model", default="resnet50", help="one of torchvision's ResNets")
    parser.add_argument("--batch", type=int, default=16, help="images per step")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    if options.batch % options.micro_batches:
        parser.error("--batch must be a multiple of --micro-batches: stages have fixed shapes")
    config = replace(
        smoke(),
        data=replace(smoke().data, batch_size=options.batch),
        model=ModelConfig(name=options.model),
    )
    with join_world(config.compute) if options.pipeline else nullcontext() as ranks:
        if options.pipeline and ranks.size != 2:
            parser.error("--pipeline needs two processes: torchrun --nproc-per-node 2 ...")
        train(config, options, ranks)


def train(config: Config, options: argparse.Namespace, ranks: World | None) -> None:
    """The loop of `train.py`, in short; `ranks` are those of a pipeline."""
    devices = [torch.device("cpu")] * 2
    if torch.cuda.device_count() > 1:
        devices = [torch.device("cuda", number) for number in range(2)]
    # Every rank of a pipeline has the whole batch, not its share: seed and step decide its pixels,
    # so the first rank takes the images and the second the labels, and none are sent.
    world = World(ranks.device if ranks else devices[-1])
    data = TrainData(config, world)
    precision = Precision("fp32", config.compute, config.optim, world.device)
    normalize = Normalize(data.source, config.data.max_size, precision, config.augment.tta)
    augment = build_augment(config.augment, data, normalize, config.seed)
    loss_fn = build_loss(config, data, options.batch)
    model = init_model(config, data, normalize).to(memory_format=precision.memory_format)
    if ranks:
        how = options.schedule, options.micro_batches
        model, step_fn = pipeline_step(model, ranks, loss_fn, *how)
    else:
        model = Split(model, devices, options.micro_batches)

        def step_fn(images: Tensor, labels: Tensor) -> Tensor:
            batch = Augmented(images, labels)
            return train_step(model, batch, loss_fn, precision, options.batch)

    optimizer = build_optimizer(config.optim, model)  # of this rank's half
    lr_at = build_schedule(config.optim, data.steps_per_epoch, data.total_steps)
    for step, batch in enumerate(data.batches(0, options.steps)):
        set_lr(optimizer, lr_at(step))
        loss = step_fn(*augment(batch, step)[:2])
        precision.step(optimizer)
        if loss is not None:
            print(f"step {step + 1}  loss {float(loss):.4f}", flush=True)


if __name__ == "__main__":
    main()
