"""The network in fewer bits and for other runtimes: contents of files, and what predicts from them.

Only the network is changed. What is before its first layer with weights and behind its last one, so
resizing, normalization and probabilities, stays in float32.
"""

import copy
import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from ...checkpoints import LoadedModel
from ...data import BadImageError, fit_square, open_dataset
from ...errors import UserError
from ..export.export_graph import ExportModule
from ..export.formats import FORMATS, Predict
from .exports import EdgeOptions

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto

Files = dict[str, tuple[bytes, Predict]]

LAYERS = {"Conv", "ConvTranspose", "Gemm", "MatMul"}  # whose weights are quantized


class Half(nn.Module):
    """A network that computes in float16, between images and logits of float32."""

    def __init__(self, network: nn.Module) -> None:
        """Copy `network`."""
        super().__init__()
        self.network = copy.deepcopy(network).half()

    def forward(self, images: Tensor) -> Tensor:
        """(batch, channels, side, side) to (batch, classes), both float32."""
        return self.network(images.half()).float()


def half_onnx(trained: LoadedModel, is_raw: bool) -> bytes:
    """The ONNX graph, with a network of float16."""
    half = replace(trained, model=Half(trained.model))
    return FORMATS["onnx"](ExportModule(half, is_raw).eval().requires_grad_(False))[0]


def int8_onnx(exact: bytes, trained: LoadedModel, options: EdgeOptions) -> bytes:
    """The ONNX graph `exact`, with int8 where its network has weights and activations.

    Static, in QDQ form: weights per channel, activations by the range in training images. These are
    unsigned, which x86 multiplies twice as fast, or symmetric.
    """
    from onnx import load_model_from_string
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

    batches = training_images(trained, options)

    class Reader(CalibrationDataReader):
        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(({"images": images.numpy()} for images in batches), None)

    graph = load_model_from_string(exact)
    rename_constants(graph.graph)
    with TemporaryDirectory() as folder, only_errors():
        path = Path(folder, "model.onnx")
        quantize_static(
            graph,
            path,
            Reader(),
            per_channel=True,
            activation_type=QuantType.QInt8 if options.symmetric else QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            nodes_to_exclude=outside_network(graph.graph),
            extra_options={"ActivationSymmetric": options.symmetric},
        )
        return path.read_bytes()


def rename_constants(graph: "GraphProto") -> None:
    """Rename weights in place, so that no copy of one gets the name of another tensor.

    The quantizer adds digits to the name of a constant that several layers share: torch's `val_18`
    became `val_186`, which may be there.
    """
    names = {tensor.name: f"{tensor.name}." for tensor in graph.initializer}
    for tensor in graph.initializer:
        tensor.name = names[tensor.name]
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]


@contextmanager
def only_errors() -> Iterator[None]:
    """A block without the quantizer's advice, which torch's graphs do not need."""
    logger = logging.getLogger()
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def training_images(trained: LoadedModel, options: EdgeOptions) -> Iterator[Tensor]:
    """`options.calibration_images` of the training, one by one, as the graph takes them.

    Where their folder is gone, they are those of `options.root`.

    Raises:
        UserError: if none of them can be read.
    """
    data = replace(trained.config.data, image_size=trained.config.data.eval_size)
    images = data if Path(data.root).exists() else replace(data, root=options.root or data.root)
    source = trained.check_images(open_dataset(images, "train"), "train")
    source = replace(source, weights=None).thinned(min(options.calibration_images, len(source)))
    num_read = 0
    for index in range(len(source)):
        square = source.empty(1, data.eval_size)
        with suppress(BadImageError):
            fit_square(source.read(index), square[0], data.fit, trained.mean)
            num_read += 1
            yield trained.normalize(square.permute(0, 3, 1, 2)) if options.raw else square
    if not num_read:
        raise UserError("--precision int8: no training image can be read, to set its ranges")


def outside_network(graph: "GraphProto") -> list[str]:
    """The names of nodes before all layers with weights, or behind all of them."""
    weights = {tensor.name for tensor in graph.initializer}
    layers = {
        node.name for node in graph.node if node.op_type in LAYERS and weights & {*node.input}
    }
    behind = reached(graph.node, layers, "input", "output")
    before = reached(reversed(graph.node), layers, "output", "input")
    return [node.name for node in graph.node if node.name not in behind & before]


def reached(nodes: Iterable["NodeProto"], layers: set[str], near: str, far: str) -> set[str]:
    """The names of `layers`, and of the nodes behind them, in the order of `nodes`.

    `near` names the tensors that a node has from nodes before it in this order, `far` the others.
    """
    names = set()
    tensors: set[str] = set()
    for node in nodes:
        if node.name in layers or tensors & {*getattr(node, near)}:
            names.add(node.name)
            tensors |= {*getattr(node, far)}
    return names


def onnx_predict(content: bytes) -> Predict:
    """What predicts with ONNX Runtime, on the CPU."""
    from onnxruntime import InferenceSession

    session = InferenceSession(content, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


def openvino(content: bytes, module: ExportModule, stem: str) -> tuple[dict[str, bytes], Predict]:
    """An ONNX graph as OpenVINO's: contents by name, `stem` and a suffix; predicts on the CPU."""
    from openvino import Core, save_model

    core = Core()
    model = core.read_model(content)  # `convert_model` reports its use to Intel
    for key, value in module.about.items():
        model.set_rt_info(json.dumps(value), ["about", key])
    with TemporaryDirectory() as folder:
        save_model(model, f"{folder}/{stem}.xml", compress_to_fp16=False)
        weights = Path(folder, f"{stem}.bin").read_bytes()
        graph = Path(folder, f"{stem}.xml").read_bytes()
    # Some processors round float32 to 16 bits otherwise.
    exact = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = core.compile_model(core.read_model(graph, weights), "CPU", exact)
    contents = {f"{stem}.bin": weights, f"{stem}.xml": graph}  # written in this order
    return contents, lambda images: torch.from_numpy(compiled(images.numpy())[0].copy())
