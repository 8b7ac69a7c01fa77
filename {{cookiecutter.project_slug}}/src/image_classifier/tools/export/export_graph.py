"""Evaluation as one graph: uint8 pixels of any size in, probabilities out.

It resizes by matrix products, which every runtime computes alike; the resize operators of the
runtimes differ from torch's, and from one another.
"""

from dataclasses import asdict
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from ...data import reflect
from ...preprocess import VIEWS
from ...tasks import TASKS
from ..loaded_model import LoadedModel

MAX_SIDE = 2**15  # pixels
# torch resizes uint8 with fixed-point weights, as Pillow does: 16 bits with the sign.
LARGEST_WEIGHT, MOST_BITS = 2**15 - 0.5, 22


class ExportModule(nn.Module):
    """A trained model on the CPU, with the preprocessing of evaluation in its graph.

    `about` says how to use it: plain values, and nothing of this machine.
    """

    def __init__(self, trained: LoadedModel, is_raw: bool = False) -> None:
        """Export `trained`; `is_raw` leaves preprocessing and probabilities out of the graph."""
        super().__init__()
        self.model, self.is_raw = trained.model, is_raw
        task = trained.config.model.task
        self.probabilities = TASKS[task].probabilities  # of logits
        self.side = side = trained.config.data.eval_size
        self.names = "images", "logits" if is_raw else "probabilities"
        views = VIEWS[trained.normalize.tta]
        self.views = [view for _, *view in views]
        self.register_buffer("weights", torch.tensor([w for w, *_ in views]).view(-1, 1, 1))
        std, mean = (torch.tensor(v, dtype=torch.float64) for v in (trained.std, trained.mean))
        self.register_buffer("scale", (1 / (255 * std)).float().view(3, 1, 1))
        self.register_buffer("shift", (-mean / std).float().view(3, 1, 1))
        pixels = "(batch, height, width, 3) uint8: red, green and blue, of any size"
        normal = f"(batch, 3, {side}, {side}) float32: (red, green and blue / 255 - mean) / std"
        self.about: dict[str, Any] = {
            "classes": list(trained.classes),
            "inputs": normal if is_raw else pixels,
            "outputs": f"(batch, classes) float32: {self.names[1]}",
            "side": side,
            "mean": list(trained.mean),
            "std": list(trained.std),
            "model": asdict(trained.config.model),
            "step": trained.step,
            "task": task,
        }
        self.temperature = trained.decision.temperature
        # From which probability on a prediction counts, or with several labels that of each class.
        self.about |= asdict(trained.decision)

    def forward(self, images: Tensor) -> Tensor:
        """Predict.

        Args:
            images: (batch, height, width, 3) uint8; raw: (batch, 3, side, side) float32.

        Returns:
            (batch, classes) float32 probabilities; raw: logits.
        """
        if self.is_raw:
            return self.model(images)
        normal = resized_square(images, self.side) * self.scale + self.shift
        # All views in one batch, so that the graph holds the model once.
        logits = self.model(torch.cat([shifted(normal, *view) for view in self.views]))
        by_view = logits.unflatten(0, (len(self.views), -1))  # (views, batch, classes)
        return self.probabilities((self.weights * by_view).sum(0) / self.temperature)

    @cached_property
    def program(self) -> ExportedProgram:
        """The graph, for batches of any size, and images of any size unless raw."""
        sizes: dict[int, Any] = {0: Dim("batch", min=1)}
        # An example with different sizes in all dimensions: torch takes equal ones for the same.
        example = torch.zeros(2, 3, self.side, self.side)
        if not self.is_raw:
            sizes[1] = Dim("height", min=1, max=MAX_SIDE)
            sizes[2] = Dim("width", min=1, max=MAX_SIDE)
            example = torch.zeros((2, self.side + 8, self.side + 16, 3), dtype=torch.uint8)
        with torch.no_grad():
            program = torch.export.export(self, (example,), dynamic_shapes=(sizes,))
        for node in program.graph.nodes:
            node.meta.pop("stack_trace", None)  # paths of this machine
        return program


def resized_square(images: Tensor, side: int) -> Tensor:
    """`decode.center_crop` of a batch: (batch, 3, side, side) float32, from 0 to 255.

    It does not branch on the size, so one graph serves all sizes. A value may differ by 1, where
    torch's float64 weights round otherwise.
    """
    height, width = images.shape[1:3]
    square = torch.minimum(scalar(height), scalar(width))
    pixels = images.permute(0, 3, 1, 2).float()
    # In two passes, rounded to integers in between, as torch does it.
    narrow = (pixels @ resize_weights(width, square, side).T + 0.5).floor()
    return (resize_weights(height, square, side) @ narrow + 0.5).floor()


def resize_weights(length: int, square: Tensor, side: int) -> Tensor:
    """How much each of `length` pixels adds to each of `side`: (side, length) float32.

    Bilinear and antialiased, of the middle `square` () pixels.
    """
    start = ((scalar(length) - square) / 2).floor()
    scale = square / side
    centers = start + (torch.arange(side)[:, None] + 0.5) * scale
    places = torch.arange(length) + 0.5
    near = (1 - (places - centers).abs() / scale.clamp(min=1)).clamp(min=0)
    near = near * ((places > start) & (places < start + square))
    weights = near / near.sum(1, keepdim=True)
    one = 2 ** ((LARGEST_WEIGHT / weights.max()).log2().ceil() - 1).clamp(max=MOST_BITS)
    return (weights * one).round() / one


def scalar(length: int) -> Tensor:
    """A length as () float32; in a graph, `length` is a symbol."""
    return torch.full((), length, dtype=torch.float32)


def shifted(images: Tensor, shift: int, is_mirrored: bool) -> Tensor:
    """`augment.shift_and_flip` of a whole batch by the same: (batch, 3, side, side) in and out."""
    if not shift and not is_mirrored:
        return images
    side = images.shape[3]
    places = torch.arange(side) + shift
    columns = side - 1 - places if is_mirrored else places
    rows = images.index_select(2, reflect(places, side))
    return rows.index_select(3, reflect(columns, side))
