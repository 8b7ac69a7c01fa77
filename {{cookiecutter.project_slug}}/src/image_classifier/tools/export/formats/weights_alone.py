"""`model.safetensors`: the weights without a graph, for other programs that have the network."""

import copy
import json
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from ..pixels import Answer
from .portable import Portable


def safetensors(network: Portable, path: Path) -> Answer:
    """The weights alone, under the names that the network has for them."""
    weights = network.network.model.state_dict()
    whole = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(whole, path, {key: json.dumps(value) for key, value in network.about.items()})
    again = copy.deepcopy(network.network)
    for tensor in again.model.state_dict().values():
        tensor.zero_()  # what the file lacks must not be there already
    again.model.load_state_dict(load_file(path))

    def answer(images: Tensor) -> Tensor:
        return again(images)

    return answer
