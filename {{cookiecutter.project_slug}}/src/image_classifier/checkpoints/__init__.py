"""Checkpoints: what they hold, saving, resuming, and weights to begin with.

Nothing in a file runs when it is read.
"""

from .loaded import LoadedModel, load_model, place_model
from .pretrained import PretrainedWeights, load_pretrained, no_network, read_weights
from .reading import (
    WRONG_CONTENT,
    Best,
    DamagedError,
    check_weights,
    first_reason,
    load_best,
    newest_first,
    parse_checkpoint,
    read_checkpoint,
    read_file,
    saved_steps,
)
from .saving import Checkpoints, read_newest
from .state import NUMBERS, TrainState
