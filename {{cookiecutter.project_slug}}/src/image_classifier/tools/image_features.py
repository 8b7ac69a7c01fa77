"""The features of images: what the last layer of a network gets."""

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..evaluate import predict_logits
from ..models import find_head
from ..precision import Precision
from ..preprocess import VIEWS, Normalize


@torch.inference_mode()
def predict_features(
    model: nn.Module, images: Tensor, normalize: Normalize, precision: Precision
) -> tuple[Tensor, Tensor]:
    """Logits (batch, classes) and features (batch, width) of images, both float32.

    Both are averaged over the views of evaluation. `model` is in evaluation mode; `images` is
    (batch, 3, size, size) uint8, channels_last.

    Raises:
        UserError: if the last layer gets more than a vector for each image.
    """
    name, head = find_head(model)
    inputs: list[Tensor] = []  # of each view
    hook = head.register_forward_pre_hook(lambda _, given: inputs.append(given[0].float()))
    try:
        logits = predict_logits(model, images, normalize, precision)
    finally:
        hook.remove()
    shape = tuple(inputs[0].shape[1:])
    if shape[1:].count(1) < len(shape) - 1:
        raise UserError(
            f"the network has no features: its last layer {name!r} gets {shape} for an image, and "
            "not one vector"
        )
    weights = [weight for weight, *_ in VIEWS[normalize.tta]]
    features = sum(w * found.flatten(1) for w, found in zip(weights, inputs, strict=True))
    return logits, features
