"""Train an image classifier: `train.py` tells the story, `config.py` lists the knobs."""

import os
from typing import Any

# Idle threads of torch would spin on the cores of data workers: libgomp reads this with torch.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever a tool offers
    """What a tool offers to programs: `from <package> import load`."""
    from .extensions import function

    if name.startswith("_") or (found := function("api", name)) is None:
        raise AttributeError(f"module {__name__!r} has no {name!r}; a tool may: pretuned add")
    return found
