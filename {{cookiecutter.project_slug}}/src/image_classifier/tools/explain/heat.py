"""Which places of an image speak for a class: heat maps, and images with these over them.

For networks whose last features form a map: LayerCAM, https://doi.org/10.1109/TIP.2021.3089943. The
last tokens of a transformer no longer tell where something is, as each has seen all others: there,
integrated gradients of the patches (https://arxiv.org/abs/1703.01365), from their median on.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from ...data import EvalData, Samples
from ...errors import UserError
from ...preprocess import Normalize

TOGETHER = 16  # images at once: gradients need more memory than predictions
STEPS = 8  # of the integral
SMALLEST = 64  # side of an image in pixels of which a page shows maps: they have 8 x 8 places then
COLOR = (235, 125, 50)  # of heat: the orange of pages, stronger


def heat_maps(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
    """How much each place speaks for a class, from 0 to 1: (batch, height, width) float32.

    In each image the least is 0 and the most is 1; all is 0 where no place says more than others.
    Computed in float32. `model` is left as it was.

    Args:
        model: maps `images` to (batch, classes) logits; neither wrapped for DDP nor sharded.
        images: (batch, channels, height, width) float32, normalized.
        classes: the class for each image, (batch,) int64.

    Raises:
        UserError: if no layer of the network returns features of places.
    """
    in_training = [layer for layer in model.modules() if layer.training]
    model.eval()
    try:
        # Even within blocks of autocast, and of inference, whose tensors have no gradients.
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(images.device.type, enabled=False),
        ):
            parts = zip(images.split(TOGETHER), classes.split(TOGETHER), strict=True)
            return torch.cat([mean_maps(model, part.clone(), some.clone()) for part, some in parts])
    finally:
        for layer in in_training:
            layer.training = True


def mean_maps(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
    """`heat_maps` of images that fit into memory at once; `each_network` gives those in `model`."""
    each = getattr(model, "each_network", lambda given: [(model, given)])
    heat = sum(maps_of(*own, classes) for own in each(images))
    heat = heat - heat.amin((1, 2), keepdim=True)
    return heat / heat.amax((1, 2), keepdim=True).clamp(min=torch.finfo(heat.dtype).tiny)


def maps_of(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
    """The maps of a single network; the most in each is 1."""
    outputs: list[tuple[nn.Module, Tensor]] = []

    def note(layer: nn.Module, _: object, output: object) -> None:
        shape = output.shape if isinstance(output, Tensor) else ()
        # Maps, which are squares, and the tokens of transformers; not queries: heads x tokens.
        is_of_places = len(shape) == 3 or (len(shape) == 4 and shape[2] in (shape[1], shape[3]))
        if is_of_places and shape[0] == len(images) and min(shape[1:3]) > 1 < shape[-1]:
            outputs.append((layer, output))

    with hooks(model, note):
        # A leaf for gradients, as all weights may be frozen; the first layer may change its input.
        score = score_of(model, images.requires_grad_().clone(), classes)
    stem = next((pair for pair in outputs if pair[1].ndim == 4), None)
    if stem is None:
        raise UserError(f"{type(model).__name__} has no layer that returns a map of features")
    features = outputs[-1][1]
    if features.ndim == 4:
        (slopes,) = torch.autograd.grad(score, features)
        heat = features.detach() * slopes.relu()
    else:
        heat = integrated_gradients(model, *stem, images.detach(), classes)
    is_last = heat.shape[1] == heat.shape[2] != heat.shape[3]  # channels
    heat = heat.sum(3 if is_last else 1).relu()[:, None]
    heat = interpolate(heat, images.shape[2:], mode="bilinear")[:, 0]
    return heat / heat.amax((1, 2), keepdim=True).clamp(min=torch.finfo(heat.dtype).tiny)


def integrated_gradients(
    model: nn.Module, stem: nn.Module, patches: Tensor, images: Tensor, classes: Tensor
) -> Tensor:
    """What each number of `patches`, the output of `stem`, adds to the logits, in their shape."""
    ranked = patches.detach().flatten(2).sort(2).values  # --deterministic refuses `median` on a GPU
    usual = ranked[:, :, (ranked.shape[2] - 1) // 2, None, None]  # their median, such as background
    change = patches.detach() - usual
    total = torch.zeros_like(patches)
    for step in range(STEPS):
        between = (usual + change * (step + 0.5) / STEPS).requires_grad_()
        with hooks(
            stem, lambda layer, *_, tensor=between: tensor.clone() if layer is stem else None
        ):
            score = score_of(model, images, classes)
        total += torch.autograd.grad(score, between)[0] / STEPS
    return change * total


def score_of(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
    """The sum of the logits of `classes`."""
    # Not `model(images)`, which may be compiled without the hooks.
    return model.forward(images).gather(1, classes[:, None]).sum()


@contextmanager
def hooks(model: nn.Module, hook: Callable[..., Tensor | None]) -> Iterator[None]:
    """A block in which `hook(layer, inputs, output)` is called after each layer of `model`."""
    handles = [layer.register_forward_hook(hook) for layer in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def painted(pixels: Tensor, heat: Tensor) -> Tensor:
    """Images in gray with their heat maps in color over them: (batch, height, width, 3) uint8.

    Args:
        pixels: (batch, height, width, channels), of any integer type.
        heat: (batch, height, width) float32, from 0 to 1.
    """
    gray = pixels.float().mean(3, keepdim=True) * (200 / torch.iinfo(pixels.dtype).max)
    color = torch.tensor(COLOR, device=pixels.device)
    return torch.lerp(gray.expand(-1, -1, -1, 3), color.float(), 0.7 * heat[..., None]).byte()


def open_explainer(
    model: nn.Module, normalize: Normalize, data: EvalData
) -> Callable[[list[int], list[int]], Tensor]:
    """A function from numbers of images of `data`, and of classes, to what is `painted` of them.

    The images are as the model sees them. The function raises `UserError` if they are so small that
    a map says little.
    """

    def explain(indices: list[int], classes: list[int]) -> Tensor:
        side = data.data.image_size
        if side < SMALLEST:
            raise UserError(f"they say little of images of {side} pixels")
        device = normalize.scale.device
        pixels = data.source.empty(len(indices), side)
        Samples(data.source, data.data).fill(pixels, 0, np.array(indices))
        images = normalize(pixels.to(device).permute(0, 3, 1, 2))
        heat = heat_maps(model, images, torch.tensor(classes, device=device))
        return painted(pixels, heat.cpu())

    return explain
