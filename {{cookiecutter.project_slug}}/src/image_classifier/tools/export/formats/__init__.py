"""Files that a trained model is exported to, by name.

To add one: a function in a file of its own here, and its name in `FORMATS`.

    def mine(network: Portable, path: Path) -> Answer:
        ...

It writes the model to `path`, with what `network.about` says of it, and returns what answers to
images from the file that it wrote: `export` compares that with the model.
"""

from collections.abc import Callable
from pathlib import Path

from ..pixels import Answer
from .examples import example
from .int8 import int8
from .onnx_graph import check_libraries, onnx, open_onnx
from .portable import Portable
from .torch_program import pt2
from .weights_alone import safetensors

__all__ = ["FORMATS", "Portable", "check_libraries", "example", "int8", "open_onnx"]

FORMATS: dict[str, Callable[[Portable, Path], Answer]] = {
    format_.__name__: format_ for format_ in (onnx, pt2, safetensors)
}
