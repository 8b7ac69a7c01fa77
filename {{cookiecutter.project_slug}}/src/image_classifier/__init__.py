"""Train an image classifier: `train.py` tells the story, `config.py` lists the knobs."""

import os

# Threads of torch that have nothing to do spin for about a millisecond before they sleep, on the
# very cores that data workers decode on. libgomp reads this when torch is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def __getattr__(name: str) -> object:
    """What a tool offers to programs: `from <package> import load`."""
    from .extensions import function

    if name.startswith("_") or (found := function("api", name)) is None:
        raise AttributeError(f"module {__name__!r} has no {name!r}; a tool may: pretuned add")
    return found
