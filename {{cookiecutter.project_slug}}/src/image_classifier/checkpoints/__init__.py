"""Checkpoints: what they hold, saving, resuming, and weights to begin with.

Nothing in a file runs when it is read.
"""

from .loaded import LoadedModel, load_model, place_model
from .pretrained import PretrainedWeights, load_pretrained, no_network, read_weights
from .reading import Best, DamagedError, first_reason, load_best, parse_checkpoint, read_file
from .saving import Checkpoints, read_newest
from .state import NUMBERS, TrainState
