"""A model with all that others need to use it, on its way into a file."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.export import Dim, ExportedProgram

from ....config import FaultError
from ..pixels import FromNormalised, FromPixels

LONGEST = 2**15  # pixels of a side


@dataclass(frozen=True)
class Portable:
    """A network on the CPU in evaluation mode, and what a file says of it."""

    network: FromPixels | FromNormalised
    about: dict[str, Any]  # plain values: how it is used, and where it is from

    @property
    def is_raw(self) -> bool:
        """Whether it takes normalised images and gives logits."""
        return isinstance(self.network, FromNormalised)

    @property
    def names(self) -> tuple[str, str]:
        """Of what goes in, and of what comes out."""
        return "images", "logits" if self.is_raw else "probabilities"

    @cached_property
    def program(self) -> ExportedProgram:
        """The network as a graph for batches of any size, and of images of any size if not raw.

        Raises:
            FaultError: if torch can't make a graph of it.
        """
        side = self.about["side"]
        sizes: dict[int, Any] = {0: Dim("batch", min=1)}
        # An example whose sizes are all different, or torch takes two for the same.
        example = torch.zeros(2, 3, side, side)
        if not self.is_raw:
            sizes |= {1: Dim("height", min=1, max=LONGEST), 2: Dim("width", min=1, max=LONGEST)}
            example = torch.zeros((2, side + 8, side + 16, 3), dtype=torch.uint8)
        try:
            with torch.no_grad():
                program = torch.export.export(self.network, (example,), dynamic_shapes=(sizes,))
        except Exception as error:  # of many kinds, as many as there are ways to write a network
            reason = " ".join(str(error).split()) or type(error).__name__
            raise FaultError(
                f"torch.export can't make a graph of the model: {reason[:300]}"
            ) from error
        for node in program.graph.nodes:
            # The files and lines that it came from, on this machine: most of a small file, too.
            node.meta.pop("stack_trace", None)
        return program
