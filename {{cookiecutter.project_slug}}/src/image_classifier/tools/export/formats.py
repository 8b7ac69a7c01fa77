"""The file formats of `export`, by name.

To add one: write a function below, and add it to `FORMATS`. It returns the content of a file, with
`module.about` in it, and a function that predicts from that content, which `export` verifies.
"""

import io
import json
from collections.abc import Callable
from copy import deepcopy
from importlib.util import find_spec

import torch
from torch import Tensor

from ...errors import UserError
from ...runtime.console import first_line
from ...runtime.files import tensor_file
from ...runtime.platform import install_command
from .export_graph import ExportModule

OPSET = 18  # what torch writes without a conversion
LARGEST = 2**31 - 2**24  # bytes of weights in an ONNX file, of 2 GiB with the graph
ONNX_LIBRARIES = ("onnx", "onnxscript", "onnxruntime")

Predict = Callable[[Tensor], Tensor]  # images -> (batch, classes), as `ExportModule.forward`


def onnx(module: ExportModule) -> tuple[bytes, Predict]:
    """An ONNX graph with the weights in it; ONNX Runtime predicts, on the CPU.

    Raises:
        UserError: if the weights are too large, or torch can't write the network as ONNX.
    """
    from onnx.checker import check_model
    from onnxruntime import InferenceSession

    size = sum(tensor.nbytes for tensor in module.state_dict().values())
    if size > LARGEST:
        raise UserError(
            f"an ONNX file holds 2 GB, and the weights are {size / 1e9:.1f}: take --format pt2 "
            "safetensors"
        )
    try:
        graph = torch.onnx.export(
            module.program,
            dynamo=True,
            input_names=module.names[:1],
            output_names=module.names[1:],
            opset_version=OPSET,
            verbose=False,
        )
    except torch.onnx.OnnxExporterError as error:
        reason = error
        while reason.__cause__:
            reason = reason.__cause__
        raise UserError(
            f"torch {torch.__version__} can't write this network as ONNX: {first_line(reason)}; "
            "take --format pt2 safetensors"
        ) from error
    # torch names dynamic sizes by numbers of its own.
    sizes = zip(graph.model.graph.inputs[0].shape, ("batch", "height", "width"), strict=False)
    graph.rename_axes({str(size): name for size, name in sizes if not isinstance(size, int)})
    for node in graph.model.graph.all_nodes():
        node.metadata_props.clear()  # lines of Python, with paths of this machine
    for key, value in module.about.items():
        graph.model.metadata_props[key] = json.dumps(value)
    content = graph.model_proto.SerializeToString()
    check_model(content, full_check=True)
    session = InferenceSession(content, providers=["CPUExecutionProvider"])
    name = module.names[0]
    return content, lambda images: torch.from_numpy(session.run(None, {name: images.numpy()})[0])


def pt2(module: ExportModule) -> tuple[bytes, Predict]:
    """A torch.export program: runs in torch without this package; AOTInductor compiles it."""
    file = io.BytesIO()
    torch.export.save(module.program, file, extra_files={"about.json": json.dumps(module.about)})
    file.seek(0)
    # Loading may unpickle: safe here, as the content was made just above.
    return file.getvalue(), torch.export.load(file).module()


def safetensors(module: ExportModule) -> tuple[bytes, Predict]:
    """The weights without a graph, by their names in the network."""
    from safetensors.torch import load

    own = module.model.state_dict()  # in which several names may have one tensor: copies have not
    copies = {name: w.clone(memory_format=torch.contiguous_format) for name, w in own.items()}
    content = tensor_file(copies, module.about)
    other = deepcopy(module)
    other.model.load_state_dict(load(content))
    return content, other


FORMATS = {"onnx": onnx, "pt2": pt2, "safetensors": safetensors}


def check_libraries() -> None:
    """Check that the libraries for ONNX are installed."""
    if missing := [name for name in ONNX_LIBRARIES if find_spec(name) is None]:
        raise UserError(
            f"--format onnx needs {', '.join(missing)}: {install_command(*ONNX_LIBRARIES)}; "
            "or take --format pt2 safetensors"
        )
