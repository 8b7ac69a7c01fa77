"""Galleries of a page: mistakes, examples of classes, and training images as the model saw them."""

from collections.abc import Callable
from html import escape

import torch
from torch import Tensor

from ...errors import FaultError, UserError
from ...metrics import Predictions, recalls
from .images import Picture, gallery

PICTURES = 24  # wrong predictions that are shown
CLASSES = 8  # of which examples are shown
EXAMPLES = 4  # right ones of a class, and as many that are missed
HEAT = (
    "The gray image is what the model saw; in color, the places that raise the score of the "
    "predicted class, from the weakest to the strongest of the image, however little they differ. "
    "They say where, roughly, but not what was recognized there, nor whether it is why."
)

Explain = Callable[[list[int], list[int]], Tensor]  # numbers of images, and of classes, to images
# with heat maps over them: (count, height, width, 3) uint8 on the host
Samples = tuple[Tensor, Tensor, int]  # training images (count, height, width, channels); labels
# (count,) int64, or (count, classes) if they are mixed or several; the step that used them


def mistakes(predictions: Predictions, explain: Explain | None) -> str:
    """The wrong predictions with the highest confidence: image, predicted and true class.

    With several labels, the wrong decisions on one of them.
    """
    has_several = predictions.source.is_multi_label
    wrong = (predictions.is_counted & ~predictions.is_correct).nonzero()  # (count, 1 or 2)
    surest = predictions.probability[*wrong.T].argsort(descending=True, stable=True)
    shown = wrong[surest][:PICTURES]
    indices = shown[:, 0].tolist()
    classes = (shown[:, 1] if has_several else predictions.predicted[shown[:, 0]]).tolist()
    notes = ["In color the predicted class, below it the true one. Some may be wrong labels."]
    if has_several:
        notes = ["In color labels that the image has not, others it has. Some may be wrong labels."]
    heats = [None] * len(indices)
    if explain and indices:
        try:
            heats = explain(indices, classes)
            notes.append(HEAT)
        except Exception as error:  # a network without a feature map, or too little memory
            notes.append(f"No heat maps: {error}")
    pictures = [
        picture(predictions, index, number, heat)
        for index, number, heat in zip(indices, classes, heats, strict=True)
    ]
    return "".join(f"<p>{escape(note)}</p>" for note in notes) + gallery(pictures)


def class_examples(predictions: Predictions) -> str:
    """Of the classes with the lowest recall, images that are right, and images that are missed.

    The surest first, of both.
    """
    source = predictions.source
    recall = torch.from_numpy(recalls(predictions))
    parts = []
    for number in [n for n in recall.argsort(stable=True).tolist() if recall[n] < 1][:CLASSES]:
        column = (slice(None), number) if source.is_multi_label else (slice(None),)
        has_label = source.labels[column] == (1 if source.is_multi_label else number)
        counted = predictions.is_counted[column] & has_label
        right = predictions.is_correct[column]
        surest = predictions.target_probability[column].argsort(descending=True, stable=True)
        found = surest[(counted & right)[surest]]
        missed = surest[(counted & ~right)[surest]].flip(0)
        shown = torch.cat([found[:EXAMPLES], missed[:EXAMPLES]]).tolist()
        tiles = [picture(predictions, index, number) for index in shown]
        name = f"{source.classes[number]}: {len(found):,} of {len(found) + len(missed):,}"
        parts.append(f"<h3>{escape(name)}</h3>{gallery(tiles)}")
    note = f"Up to {EXAMPLES} images that are recognized, and {EXAMPLES} that are missed."
    shown = "".join(parts) or "<p>None.</p>"
    return f"<h2>Classes with the lowest recall</h2><p>{note}</p>{shown}"


def picture(
    predictions: Predictions, index: int, number: int, heat: Tensor | None = None
) -> Picture:
    """An image with the predicted class, and the true one if that is another.

    With several labels, with the probability of the label `number`.
    """
    source = predictions.source
    if source.is_multi_label:
        style = "true" if source.labels[index, number] else "wrong-class"
        found = [(style, number, predictions.probabilities[index, number])]
    else:
        found = [("true", int(source.labels[index]), predictions.target_probability[index])]
        if not predictions.is_correct[index]:
            taken = int(predictions.predicted[index])
            found.insert(0, ("wrong-class", taken, predictions.probability[index]))
    lines = [(style, source.classes[n], f"{share:.1%}") for style, n, share in found]
    title = f"image {index}"
    if source.paths is not None:
        title = source.paths.relative(index).decode("utf-8", "backslashreplace")
    try:
        pixels = source.read(index)
    except (UserError, FaultError):  # it is gone
        pixels = None
    return Picture(pixels, title, lines, heat)


def augmented(samples: Samples, classes: tuple[str, ...]) -> str:
    """Training images as the model saw them, with the shares of mixed labels."""
    pixels, labels, step = samples
    pictures = []
    for image, label in zip(pixels.cpu(), labels.cpu(), strict=True):
        if label.ndim:
            present = (label > 0).nonzero()
            shares = sorted(((float(label[n]), int(n)) for n in present), reverse=True)
            lines = [("true", classes[n], f"{share:.1%}" * (share < 1)) for share, n in shares]
        else:
            lines = [("true", classes[int(label)] if label >= 0 else "cannot be read", "")]
        pictures.append(Picture(image, f"step {step}", lines))
    note = f"As the model saw them in step {step:,}."
    return f"<h2>Augmented training images</h2><p>{note}</p>{gallery(pictures)}"
