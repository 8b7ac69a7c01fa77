"""`model.onnx`: a graph that ONNX Runtime, TensorRT, OpenVINO and many others take."""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ....config import UserError
from ..pixels import Answer
from .portable import Portable

OPSET = 18  # which torch writes by itself: no conversion could change what it means
NEEDED = ("onnx", "onnxscript", "onnxruntime")
MOST_BYTES = 2**31  # of a file of protocol buffers


def onnx(network: Portable, path: Path) -> Answer:
    """One file with the weights in it; checked, and run by ONNX Runtime.

    Raises:
        UserError: if a library that is needed is not there, or the model is too large.
    """
    import onnx as library

    weights = network.network.state_dict().values()
    if sum(weight.nbytes for weight in weights) > 0.99 * MOST_BYTES:
        raise UserError("a file of ONNX holds less than 2 GB, the model is larger: --format pt2")
    names, program = network.names, network.program
    graph = torch.onnx.export(
        program,
        dynamo=True,
        input_names=names[:1],
        output_names=names[1:],
        opset_version=OPSET,
        verbose=False,
    )
    # torch calls sizes that vary by numbers of its own.
    sizes = zip(graph.model.graph.inputs[0].shape, ("batch", "height", "width"), strict=False)
    graph.rename_axes({str(size): name for size, name in sizes if not isinstance(size, int)})
    for node in graph.model.graph.all_nodes():
        node.metadata_props.clear()  # the lines of Python it came from: most of a small file
    for key, value in network.about.items():
        graph.model.metadata_props[key] = json.dumps(value)
    graph.save(path, external_data=False)
    library.checker.check_model(path, full_check=True)
    return open_onnx(path)


def open_onnx(path: Path) -> Answer:
    """ONNX Runtime on the CPU, with the graph at `path`."""
    from onnxruntime import InferenceSession

    session = InferenceSession(path, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name

    def answer(images: Tensor) -> Tensor:
        return torch.from_numpy(np.asarray(session.run(None, {name: images.numpy()})[0]))

    return answer


def check_libraries() -> None:
    """Refuse to begin without what ONNX needs.

    Raises:
        UserError: naming what is missing.
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise UserError(
            f"--format onnx needs {', '.join(missing)}: pip install {' '.join(NEEDED)}; "
            "or take --format pt2 safetensors"
        )
