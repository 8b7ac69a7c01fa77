"""`model.int8.onnx`: the layers with weights in 8 bits, which processors are faster at.

Weights by channel, and features by the range that they have on training images:
https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from torch import Tensor

from ..pixels import Answer
from .onnx_graph import open_onnx


def int8(graph: Path, path: Path, images: Iterable[Tensor]) -> Answer:
    """Write the ONNX file `graph` in 8 bits to `path`, calibrated by `images` as it takes them."""
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Images(CalibrationDataReader):
        """What quantisation asks for images, one at a time."""

        def __init__(self) -> None:
            self.iterator = iter(images)

        def get_next(self) -> dict[str, np.ndarray] | None:
            image = next(self.iterator, None)
            return None if image is None else {"images": image.numpy()}

    folded = path.with_name("folded.onnx")  # norms into the convolutions before them
    quant_pre_process(graph, folded, skip_symbolic_shape=True)
    model = onnx.load(folded)
    weights = {weight.name for weight in model.graph.initializer}
    # Not the products that scale images, whose factors are computed from their size.
    layers = [
        node.name
        for node in model.graph.node
        if node.op_type in ("Conv", "Gemm", "MatMul") and weights & set(node.input)
    ]
    quantize_static(
        folded,
        path,
        Images(),
        nodes_to_quantize=layers,
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
    )
    whole = onnx.load(path)
    about = {entry.key: entry.value for entry in onnx.load(graph).metadata_props}
    onnx.helper.set_model_props(whole, about)
    onnx.save(whole, path)
    onnx.checker.check_model(path, full_check=True)
    return open_onnx(path)
