"""A trained model, in its network on the device."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..config import ComputeConfig, DataConfig, RunConfig
from ..data import EvalData, Source
from ..errors import UserError
from ..evaluate import Scores, evaluate, predict_features, predict_logits
from ..models import build_model, load_weights
from ..precision import Precision
from ..preprocess import Normalize
from ..runtime.console import some
from ..runtime.distributed import World
from ..runtime.machine import usual_precision
from ..runtime.run_dir import best_checkpoint
from ..tasks import TASKS
from .reading import Best, first_reason, load_best


@dataclass(frozen=True)
class LoadedModel(Best):
    """The best weights of a run, in their model on the device, in evaluation mode.

    Evaluation, predictions, exports and programs use it by these functions. `model` maps what
    `normalize` returns to (batch, classes) logits.
    """

    model: nn.Module
    normalize: Normalize
    precision: Precision

    @torch.inference_mode()
    def logits(self, images: Tensor) -> Tensor:
        """The logits of images on the device, (batch, classes) float32: see `predict_logits`."""
        return predict_logits(self.model, images, self.normalize, self.precision)

    def features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The logits, and what the last layer gets, (batch, width): see `predict_features`."""
        return predict_features(self.model, images, self.normalize, self.precision)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Calibrated probabilities of logits, both (count, classes) float32."""
        return TASKS[self.config.model.task].probabilities(logits / self.decision.temperature)

    def open_images(
        self, split: str, world: World, run: RunConfig | None = None, data: DataConfig | None = None
    ) -> EvalData:
        """The images of a split of the training data, or of other `data`, to evaluate on.

        Raises:
            UserError: if there are none, or not with labels and classes of the model.
        """
        how = {"task": self.config.model.task, "mean_std": (self.mean, self.std)}
        images = EvalData(data or self.config.data, split, world, run, classes=self.classes, **how)
        self.check_images(images.source, split)
        return images

    def evaluate(self, images: EvalData) -> Scores:
        """The scores on all images, of which each rank has a part; see `evaluate`."""
        return evaluate(self.model, images, self.normalize, self.precision)

    def check_images(self, source: Source, split: str) -> Source:
        """The images, if they have labels for the task of the model, of some of its classes.

        Raises:
            UserError: if not.
        """
        source = source.fitted(self.config.model.task, split, self.classes)
        if source.classes != self.classes:
            raise UserError(
                f"{str(self.path)!a} knows the classes {some(self.classes)}, which are "
                f"not those of the images: {some(source.classes)}"
            )
        source.check_labels(split)
        return source


def load_model(run: str, compute: ComputeConfig, world: World) -> LoadedModel:
    """Load the trained model of a run folder or checkpoint, on the device of `world`.

    Raises:
        UserError: if there is no such run, or its checkpoint can't be used.
    """
    path = best_checkpoint(run)
    for _ in range(5):  # a run may save another one between two ranks that read it
        best = load_best(path)
        if world.is_same(int(best.digest[:15], 16)):
            return place_model(best, compute, world)
    raise UserError(f"{str(path)!a} is not the same file for all ranks: copy it to all machines")


def place_model(best: Best, compute: ComputeConfig, world: World) -> LoadedModel:
    """A trained model on the device of `world`.

    Raises:
        UserError: if its checkpoint holds other weights than its network has.
    """
    config = best.config
    name = config.precision
    usual = usual_precision(world.device)
    if name != usual and (world.device.type != "cuda" or name == "bf16"):  # trained elsewhere
        name = "fp32"
    precision = Precision(name, compute, config.optim, world.device)
    size = config.data.image_size
    model = build_model(config.model, len(best.classes), size, config.data.channels)
    try:
        load_weights(model, best.weights)
    except RuntimeError as error:
        raise UserError(f"{str(best.path)!a} holds another model: {first_reason(error)}") from error
    model = precision.place(model).eval()
    return LoadedModel(
        **vars(best) | {"weights": model.state_dict()},  # those of the file need not stay
        model=model,
        normalize=Normalize(best, config.data.eval_size, precision, config.augment.tta),
        precision=precision,
    )
