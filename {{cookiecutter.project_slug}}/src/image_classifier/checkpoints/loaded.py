"""A trained model, in its network on the device."""

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from ..config import ComputeConfig
from ..data import Source
from ..errors import UserError
from ..models import build_model
from ..precision import Precision
from ..preprocess import Normalize
from ..runtime.console import some
from ..runtime.distributed import World
from ..runtime.machine import usual_precision
from .reading import Best, first_reason, load_best


@dataclass(frozen=True)
class LoadedModel(Best):
    """The best weights of a run, in their model on the device, in evaluation mode.

    `model` maps what `normalize` returns to (batch, classes) logits.
    """

    model: nn.Module
    normalize: Normalize
    precision: Precision

    def check_images(self, source: Source, split: str) -> Source:
        """The images, if they have labels for the task of the model, and its classes.

        Raises:
            UserError: if not.
        """
        if source.classes != self.classes:
            raise UserError(
                f"{str(self.path)!a} knows the classes {some(self.classes)}, which are "
                f"not those of the images: {some(source.classes)}"
            )
        source.check_labels(split)
        return source.fitted(self.config.model.task, split)


def load_model(run: str, compute: ComputeConfig, world: World) -> LoadedModel:
    """Load the trained model of a run folder or checkpoint, on the device of `world`.

    Raises:
        UserError: if there is no such run, or its checkpoint can't be used.
    """
    path = Path(run) / "checkpoints" / "best.pt" if Path(run).is_dir() else Path(run)
    best = load_best(path)
    while not world.is_same(int(best.digest[:15], 16)):
        best = load_best(path)  # the run has saved another since some rank read it
    return place_model(best, compute, world)


def place_model(best: Best, compute: ComputeConfig, world: World) -> LoadedModel:
    """A trained model on the device of `world`.

    Raises:
        UserError: if its checkpoint holds other weights than its network has.
    """
    config = best.config
    name = config.precision
    usual = usual_precision(world.device)
    if world.device.type != "cuda" and name != usual:  # a CUDA GPU may have trained it
        name = "fp32"
    precision = Precision(name, compute, config.optim, world.device)
    size = config.data.image_size
    model = build_model(config.model, len(best.classes), size, config.data.channels)
    try:
        model.load_state_dict(best.weights)
    except RuntimeError as error:
        raise UserError(f"{str(best.path)!a} holds another model: {first_reason(error)}") from error
    model = model.to(precision.device, memory_format=precision.memory_format).eval()
    return LoadedModel(
        **vars(best) | {"weights": model.state_dict()},  # those of the file need not stay
        model=model,
        normalize=Normalize(best, config.data.eval_size, precision, config.augment),
        precision=precision,
    )
