"""Whether a file of a model answers to real images as the model does."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...config import FaultError, UserError
from ...data import BadImageError, Source, centre_crop, check_numbers, open_dataset
from ...runtime.console import some
from ...trained import Trained
from .pixels import Answer

TOGETHER = (1, 2, 7)  # images in the batches that are tried
MOST_LOST = 0.005  # of the top-1 accuracy, by fewer bits


@dataclass(frozen=True)
class RealImages:
    """Images of a split, as an export of `trained` takes them."""

    trained: Trained
    source: Source
    is_raw: bool  # normalised squares for logits, in place of pixels for probabilities

    @property
    def side(self) -> int:
        """Of the square that the model sees in evaluation, in pixels."""
        return self.trained.config.data.eval_size

    def thinned(self, count: int) -> "RealImages":
        """Only `count` of them, spread evenly, or all."""
        return replace(self, source=self.source.thinned(min(count, len(self.source))))

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        """Pixels, (height, width, 3) uint8, and labels; bad images are left out as in training.

        Raises:
            UserError: if one can't be read and such are not to be skipped.
        """
        data = self.trained.config.data
        for number, label in enumerate(self.source.labels.tolist()):
            try:
                yield self.source.read(number), label
            except BadImageError:
                if data.on_bad_image == "stop":
                    raise

    def square(self, pixels: Tensor) -> Tensor:
        """The part that evaluation sees, (side, side, 3) uint8."""
        square = torch.empty((self.side, self.side, 3), dtype=torch.uint8)
        centre_crop(pixels, square)
        return square

    def taken(self, pixels: Tensor) -> Tensor:
        """An image as the export takes it: (1, height, width, 3) uint8, or normalised."""
        if not self.is_raw:
            return pixels[None]
        return self.trained.normalize(self.square(pixels)[None].permute(0, 3, 1, 2))

    def expected(self, pixels: Tensor) -> Tensor:
        """What the model itself says: (1, classes) probabilities, by the code of evaluation."""
        model, normalize = self.trained.model, self.trained.normalize
        planes = self.square(pixels)[None].permute(0, 3, 1, 2)
        if self.is_raw:
            return model(normalize(planes)).softmax(1)
        views = normalize.views(planes)
        return torch.stack([weight * model(view) for view, weight in views]).sum(0).softmax(1)

    def found(self, answer: Answer, images: Tensor) -> Tensor:
        """What a file says, as probabilities: (batch, classes)."""
        return answer(images).softmax(1) if self.is_raw else answer(images)


@dataclass(frozen=True)
class Reference:
    """Real images, and what the model itself says of them."""

    images: RealImages
    taken: list[Tensor]  # (1, ...) each
    squares: Tensor  # (7, ...), the first of them cut to one size
    probabilities: Tensor  # (count, classes)
    top1: float  # share of the images whose most probable class is right


def open_images(trained: Trained, split: str, root: str, is_raw: bool) -> RealImages:
    """The images of a split; `root` if they are in another folder than in training.

    Raises:
        UserError: if they are not to be had, or are of other classes.
    """
    data = trained.config.data
    source = open_dataset(replace(data, root=root or data.root), split)
    if source.classes != trained.classes:
        raise UserError(
            f"{str(trained.path)!a} knows the classes {some(trained.classes)}, which are "
            f"not those of the images: {some(source.classes)}"
        )
    check_numbers(source, split)
    return RealImages(trained, source, is_raw)


@torch.inference_mode()
def ask(images: RealImages) -> Reference:
    """Let the model see the images as evaluation does.

    Raises:
        UserError: if none can be read, or one can't and such are not to be skipped.
    """
    taken, squares, answers, right = [], [], [], 0
    for pixels, label in images:
        taken.append(images.taken(pixels))
        if len(squares) < max(TOGETHER):
            squares.append(images.taken(images.square(pixels)))
        answers.append(images.expected(pixels))
        right += int(answers[-1].argmax()) == label
    if not taken:
        raise UserError("there are no images that can be read, to compare with")
    few = torch.cat(squares * max(TOGETHER))[: max(TOGETHER)]
    return Reference(images, taken, few, torch.cat(answers), right / len(taken))


@torch.inference_mode()
def compare(answer: Answer, reference: Reference, tolerance: float) -> str:
    """What to say of a file that answers as the model does, to one image and to several at once.

    Raises:
        FaultError: if a probability is another by more than `tolerance`.
    """
    images, expected = reference.images, reference.probabilities
    found = torch.cat([images.found(answer, image) for image in reference.taken])
    largest = (found - expected).abs().max()
    for count in TOGETHER:
        together = images.found(answer, reference.squares[:count])
        numbers = torch.arange(count) % len(expected)
        largest = torch.maximum(largest, (together - expected[numbers]).abs().max())
    agreeing = int((found.argmax(1) == expected.argmax(1)).sum())
    account = (
        f"probabilities within {largest.item():.1e} of the model's, the same class for "
        f"{agreeing:,} of {len(expected):,} images"
    )
    if not largest <= tolerance:  # nor where it is not a number
        raise FaultError(
            f"not written, as it answers otherwise: {account}; --tolerance {tolerance:g}"
        )
    return account


@torch.inference_mode()
def compare_scores(fewer_bits: Answer, answer: Answer, images: RealImages) -> str:
    """What to say of a file of fewer bits that is about as often right as the one it is made of.

    Raises:
        FaultError: if it is right for less than it by `MOST_LOST` of the images.
    """
    count = right = was_right = 0
    for pixels, label in images:
        taken = images.taken(pixels)
        right += int(fewer_bits(taken).argmax()) == label
        was_right += int(answer(taken).argmax()) == label
        count += 1
    account = f"top-1 {right / count:.2%} of {count:,} images, {was_right / count:.2%} in float32"
    if was_right - right > MOST_LOST * count:
        raise FaultError(
            f"not written, as it is right less often: {account}, more than "
            f"{100 * MOST_LOST:g} points"
        )
    return account
