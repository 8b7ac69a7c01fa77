"""Evaluation as one graph: pixels of any size in, probabilities out.

It resizes by matrix products, which every runtime computes alike; the resize operators of the
runtimes differ from torch's, and from one another.
"""

from dataclasses import asdict
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from ...checkpoints import LoadedModel
from ...data import mean_color, reflect
from ...preprocess import VIEWS
from ...tasks import TASKS

MAX_SIDE = 2**15  # pixels
# torch resizes uint8 with fixed-point weights, as Pillow does: 16 bits with the sign. uint16 is
# resized as float32.
LARGEST_WEIGHT, MOST_BITS = 2**15 - 0.5, 22
SMALLEST_SUM = 1e-9  # of weights, where there is no pixel


class ExportModule(nn.Module):
    """A trained model on the CPU, with the preprocessing of evaluation in its graph.

    `about` says how to use it: plain values, and nothing of this machine.
    """

    def __init__(self, trained: LoadedModel, is_raw: bool = False) -> None:
        """Export `trained`; `is_raw` leaves preprocessing and probabilities out of the graph."""
        super().__init__()
        self.model = trained.model
        self.is_raw = is_raw
        task = trained.config.model.task
        self.probabilities = TASKS[task].probabilities  # of logits
        self.data = data = trained.config.data
        side = data.eval_size
        channels = data.channels
        bits = data.bits
        self.dtype = torch.uint8 if bits == 8 else torch.uint16
        self.names = "images", "logits" if is_raw else "probabilities"
        views = VIEWS[trained.normalize.tta]
        self.views = [view for _, *view in views]
        self.register_buffer("weights", torch.tensor([w for w, *_ in views]).view(-1, 1, 1))
        std = torch.tensor(trained.std, dtype=torch.float64)
        mean = torch.tensor(trained.mean, dtype=torch.float64)
        largest = 2**bits - 1
        self.register_buffer("scale", (1 / (largest * std)).float().view(-1, 1, 1))
        self.register_buffer("shift", (-mean / std).float().view(-1, 1, 1))
        color = mean_color(trained.mean, self.dtype).float().view(-1, 1, 1)
        self.register_buffer("color", color)  # of what is padded
        what = "red, green and blue" if channels == 3 else "all channels"
        pixels = f"(batch, height, width, {channels}) uint{bits}: {what}, of any size"
        normal = f"(batch, {channels}, {side}, {side}) float32: ({what} / {largest} - mean) / std"
        self.about: dict[str, Any] = {
            "classes": list(trained.classes),
            "inputs": normal if is_raw else pixels,
            "outputs": f"(batch, classes) float32: {self.names[1]}",
            "side": side,
            "channels": channels,
            "bits": bits,
            "fit": data.fit,
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
            images: (batch, height, width, channels) uint8 or uint16; raw: (batch, channels, side,
                side) float32.

        Returns:
            (batch, classes) float32 probabilities; raw: logits.
        """
        if self.is_raw:
            return self.model(images)
        square = resized_square(images, self.data.eval_size, self.data.fit, self.color)
        normal = square * self.scale + self.shift
        # All views in one batch, so that the graph holds the model once.
        logits = self.model(torch.cat([shifted(normal, *view) for view in self.views]))
        by_view = logits.unflatten(0, (len(self.views), -1))  # (views, batch, classes)
        return self.probabilities((self.weights * by_view).sum(0) / self.temperature)

    @cached_property
    def program(self) -> ExportedProgram:
        """The graph, for batches of any size, and images of any size unless raw."""
        sizes: dict[int, Any] = {0: Dim("batch", min=1)}
        # An example with different sizes in all dimensions: torch takes equal ones for the same.
        side = self.data.eval_size
        channels = self.data.channels
        example = torch.zeros(2, channels, side, side)
        if not self.is_raw:
            sizes[1] = Dim("height", min=1, max=MAX_SIDE)
            sizes[2] = Dim("width", min=1, max=MAX_SIDE)
            example = torch.zeros((2, side + 8, side + 16, channels), dtype=self.dtype)
        with torch.no_grad():
            program = torch.export.export(self, (example,), dynamic_shapes=(sizes,))
        for node in program.graph.nodes:
            node.meta.pop("stack_trace", None)  # paths of this machine
        return program


def resized_square(
    images: Tensor, side: int, fit: str = "crop", color: Tensor | None = None
) -> Tensor:
    """`data.fit_square` of a batch: (batch, channels, side, side) float32, whole numbers.

    It does not branch on the size, so one graph serves all sizes. Of uint8 a value may differ by 1,
    where torch's float64 weights round otherwise. `color`, (channels, 1, 1), is for `fit` pad.
    """
    height, width = images.shape[1:3]
    pixels = images.float().permute(0, 3, 1, 2)
    is_bytes = images.dtype == torch.uint8
    rows, has_rows = resize_weights(height, width, side, fit, is_bytes)
    columns, has_columns = resize_weights(width, height, side, fit, is_bytes)
    # In two passes. Those of uint8 are rounded to integers in between, as torch does it.
    narrow = pixels @ columns.T
    if is_bytes:
        narrow = (narrow + 0.5).floor()
    square = (rows @ narrow + 0.5).floor()
    return torch.where(has_rows[:, None] & has_columns, square, color) if fit == "pad" else square


def resize_weights(
    length: int, other: int, side: int, fit: str, is_bytes: bool
) -> tuple[Tensor, Tensor]:
    """How much each of `length` pixels adds to each of `side`: (side, length) float32.

    And which of `side` are of the image: (side,) bool. Bilinear and antialiased. `other` is the
    length of the image's other side.
    """
    extent = scalar(length)  # the pixels of the image that are used
    if fit == "crop":
        extent = torch.minimum(extent, scalar(other))
    start = ((scalar(length) - extent) / 2).floor()
    count = torch.full((), side)  # the pixels of the square that these fill
    if fit == "pad":  # as `padded_span`
        whole = torch.full((), length, dtype=torch.int64)
        longer = torch.maximum(whole, torch.full((), other, dtype=torch.int64))
        count = ((2 * side * whole + longer) // (2 * longer)).clamp(min=1)
    scale = extent / count
    numbers = torch.arange(side) - (side - count) // 2
    centers = start + (numbers[:, None] + 0.5) * scale
    places = torch.arange(length) + 0.5
    near = (1 - (places - centers).abs() / scale.clamp(min=1)).clamp(min=0)
    is_inside = (numbers >= 0) & (numbers < count)
    near = near * ((places > start) & (places < start + extent) & is_inside[:, None])
    weights = near / near.sum(1, keepdim=True).clamp(min=SMALLEST_SUM)
    if is_bytes:
        one = 2 ** ((LARGEST_WEIGHT / weights.max()).log2().ceil() - 1).clamp(max=MOST_BITS)
        weights = (weights * one).round() / one
    return weights, is_inside


def scalar(length: int) -> Tensor:
    """A length as () float32; in a graph, `length` is a symbol."""
    return torch.full((), length, dtype=torch.float32)


def shifted(images: Tensor, shift: int, is_mirrored: bool) -> Tensor:
    """`shift_and_flip` of a whole batch by the same: (batch, channels, side, side) in and out."""
    if not shift and not is_mirrored:
        return images
    side = images.shape[3]
    places = torch.arange(side) + shift
    columns = side - 1 - places if is_mirrored else places
    rows = images.index_select(2, reflect(places, side))
    return rows.index_select(3, reflect(columns, side))
