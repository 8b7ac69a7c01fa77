"""Pictures for trackers and pages: a confusion matrix, and images as the model sees them."""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from ...data import Source
from ...metrics import Predictions, confusion_of

SIDE = 512  # pixels of a confusion matrix, about; one of more classes has a pixel for each
MOST_CELLS = 2048  # of its side
NAME_SIDE, NAME_WIDTH, NAME_LETTERS = 12, 160, 20  # pixels and letters of the name of a class


def pictures_of(predictions: Predictions) -> dict[str, np.ndarray]:
    """Pictures by name, (height, width, 3) uint8: of several labels there are none."""
    if predictions.source.is_multi_label:
        return {}
    source = predictions.source
    share = -(-len(source.classes) // MOST_CELLS)  # classes side by side in one cell
    numbers = (predictions.predicted // share, source.labels // share)
    confusion = confusion_of(*numbers, -(-len(source.classes) // share))
    return {"confusion": confusion_image(confusion, source.classes)}


def confusion_image(confusion: Tensor, classes: Sequence[str] = ()) -> np.ndarray:
    """A confusion matrix, (classes, classes) counts, as an image: (height, width, 3) uint8.

    The darker a cell, the larger its share of the row (the true class); by its square root, so that
    one percent is visible. Each row has the name of its class, and each column its number, where a
    cell is large enough.
    """
    shares = (confusion / confusion.sum(1, keepdim=True).clamp(min=1)).sqrt()
    cells = (255 * (1 - shares)).round().byte().numpy()
    side = max(1, SIDE // len(cells))
    image = np.kron(cells, np.ones((side, side), np.uint8))[:, :, None].repeat(3, axis=2)
    if not classes or side < NAME_SIDE:
        return image
    page = Image.new("RGB", (image.shape[1] + NAME_WIDTH, image.shape[0] + NAME_SIDE), "white")
    page.paste(Image.fromarray(image), (NAME_WIDTH, NAME_SIDE))
    draw = ImageDraw.Draw(page)
    for number, name in enumerate(classes):
        middle = number * side + (side - NAME_SIDE) // 2
        label = ascii(name)[1:-1][:NAME_LETTERS]  # the font has few others
        draw.text((2, NAME_SIDE + middle), f"{number} {label}", "black")
        draw.text((NAME_WIDTH + middle, 0), str(number), "black")
    return np.asarray(page)


def denormalize(images: Tensor, source: Source) -> Tensor:
    """Normalized images as pixels of 8 bits: (batch, channels, ...) -> (batch, ..., channels)."""
    mean = torch.tensor(source.mean, device=images.device)
    std = torch.tensor(source.std, device=images.device)
    return (images.permute(0, 2, 3, 1) * std + mean).mul(255).round().clamp(0, 255).byte()
