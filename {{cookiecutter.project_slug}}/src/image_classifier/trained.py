"""A trained model, ready to predict: what evaluation, prediction and export begin with."""

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from .config import ComputeConfig, Config, UserError
from .models import build_model, load_best, misfit
from .precision import Precision
from .preprocess import Normalize
from .runtime.distributed import World
from .runtime.machine import usual_precision


@dataclass(frozen=True)
class Trained:
    """The best weights of a run in their model, and how it was trained.

    `model` maps what `normalize` returns to (batch, classes) logits.
    """

    path: Path  # of the checkpoint
    digest: str  # of the checkpoint
    step: int  # after which these were the weights
    config: Config  # of the training
    classes: tuple[str, ...]
    model: nn.Module  # on the device, in evaluation mode
    normalize: Normalize
    mean: tuple[float, ...]  # of red, green and blue from 0 to 1, as `normalize` subtracts it
    std: tuple[float, ...]
    precision: Precision


def open_trained(run: str, compute: ComputeConfig, world: World) -> Trained:
    """Load the trained model of a run folder or checkpoint, on the device of `world`.

    Raises:
        UserError: if there is no such run, or its checkpoint can't be used.
    """
    path = Path(run) / "checkpoints" / "best.pt" if Path(run).is_dir() else Path(run)
    best = load_best(path)
    while not world.is_same(int(best.digest[:15], 16)):
        best = load_best(path)  # the run has saved another since some rank read it
    config = best.config
    name, usual = config.precision, usual_precision(world.device)
    if world.device.type == "cpu" and name != usual:  # a GPU may have trained it
        name = "fp32"
    precision = Precision(name, compute, config.optim, world.device)
    model = build_model(config.model, len(best.classes), config.data.image_size)
    try:
        model.load_state_dict(best.weights)
    except RuntimeError as error:
        raise UserError(misfit(path, error)) from error
    return Trained(
        path=path,
        digest=best.digest,
        step=best.step,
        config=config,
        classes=best.classes,
        model=model.to(precision.device, memory_format=precision.memory_format).eval(),
        normalize=Normalize(best, config.data.eval_size, precision, config.augment),
        mean=best.mean,
        std=best.std,
        precision=precision,
    )
