"""`model.pt2`: a program of torch.export, for torch alone, in Python or C++."""

import json
from pathlib import Path

import torch

from ..pixels import Answer
from .portable import Portable

ABOUT = "about.json"  # what the file says of the model; beside the program in it


def pt2(network: Portable, path: Path) -> Answer:
    """torch.export: runs in torch without this package, and is what AOTInductor compiles."""
    torch.export.save(network.program, path, extra_files={ABOUT: json.dumps(network.about)})
    # Loading unpickles where a file asks for it: only what was written here, in this moment.
    return torch.export.load(path).module()
