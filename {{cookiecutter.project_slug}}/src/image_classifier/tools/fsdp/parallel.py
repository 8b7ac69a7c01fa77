"""Whether ranks train by FSDP."""

import os

from ...config import Config
from ...errors import UserError
from ...parallel import Replicas
from ...runtime.config_dict import flatten, words_of
from ...runtime.distributed import World

REFUSED = {
    "optim.name": ("muon", "sgd or adamw"),  # it needs whole matrices
    "precision": ("fp16", "bf16 or fp32"),
    "compute.compile": (True, "--compute.no-compile"),
    "compute.gradient_dtype": ("bf16", "fp32"),
}


def open_parallel(config: Config, world: World) -> Replicas | None:
    """How ranks train one model together with `--compute.parallel fsdp`; else None.

    Raises:
        UserError: if it can't train as `config` says.
    """
    if config.compute.parallel == "ddp":
        return None
    check_config(config)
    from .shards import Shards  # takes half a second to import

    return Shards(config.compute, world) if world.size > 1 else None


def check_config(config: Config) -> None:
    """Check that everything in `config` works with sharded weights.

    Raises:
        UserError: naming the first that does not.
    """
    knobs = flatten(config)
    for knob, (value, instead) in REFUSED.items():
        if knobs.get(knob) == value:
            words = " ".join(words_of({knob: value}))
            raise UserError(f"{words} does not work with --compute.parallel fsdp; take {instead}")
    try:
        os.fsencode(config.run.dir).decode()
    except UnicodeDecodeError as error:  # torch's reader opens no such file
        words = f"--run.dir {config.run.dir!a}"
        raise UserError(
            f"{words} does not work with --compute.parallel fsdp; take a name in UTF-8"
        ) from error
