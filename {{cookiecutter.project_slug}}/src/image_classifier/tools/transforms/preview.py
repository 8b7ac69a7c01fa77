"""Training images, and what augmentation makes of them in the first epochs, as one picture."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from ...augment import build_augment
from ...checkpoints import load_pretrained
from ...config import Config
from ...data import Batch, Samples, Source, TrainData, take
from ...precision import Precision
from ...preprocess import Normalize
from ...runtime.console import printable
from ...runtime.distributed import World, join_world
from ...runtime.files import write_whole
from ...runtime.run_dir import open_run
from ...runtime.seeding import images_of, seed_everything
from ..pictures.pictures import denormalize

GAP = 2  # pixels between images
TITLE_WIDTH, LETTER_HEIGHT = 72, 11  # pixels of what stands before a row


def preview(config: Config, columns: int, rows: int) -> Path:
    """Write `preview.png` to the run folder: so many images, as they are and in `rows` epochs.

    Returns its path, which it prints.

    Raises:
        UserError: if the config or the data is unusable.
        FaultError: if an image can't be read.
    """
    data = config.data
    # Only the images of the picture are decoded, where that changes no pixel.
    if config.augment.crop != "resized" or data.where == "auto":
        data = replace(data, where="stream")
    config = replace(config, data=replace(data, workers=0))
    path = Path(config.run.dir, "preview.png")
    with join_world(config.compute, config.run.timeout_seconds) as world, open_run(config, world):
        seed_everything(config.seed, config.deterministic, world.device)
        pretrained = load_pretrained(config, world)
        train_data = TrainData(config, world, pretrained.mean_std)
        with closing(train_data):
            titles, images = seen(config, world, train_data, columns, rows)
        if world.is_main:
            page = draw(titles, images)
            write_whole(path, lambda file: page.save(file, "png"))
            print(f"written: {printable(str(path))}")
    return path


def seen(
    config: Config, world: World, data: TrainData, columns: int, rows: int
) -> tuple[list[str], list[Tensor]]:
    """The first images of the first batch, a list of rows, with what stands before each.

    As they are, and as the model sees them in `rows` epochs: (columns, side, side, 3) uint8 each.
    In the first epoch that is what it sees in step 0; in others the draws are those of the first
    step of the epoch.
    """
    precision = Precision("fp32", config.compute, config.optim, world.device)
    normalize = Normalize(data.source, config.data.max_size, precision, config.augment.tta)
    augment = build_augment(config.augment, data, normalize, config.seed)
    _, numbers = next(data.places(0, 1))
    count = len(numbers)
    numbers = numbers[: columns + columns % 2]  # of pairs that are mixed, both
    place = torch.arange(count) % len(numbers)  # a whole batch, for which draws are made
    plain = normalize(loaded(config, data, numbers).permute(0, 3, 1, 2).to(world.device))
    titles = ["as they are"]
    images = [shown(plain[:columns], data.source)]
    for epoch in range(rows):
        batch = batch_of(config, data, numbers, epoch, place)
        found = augment(batch, epoch * data.steps_per_epoch).images[:columns]
        titles.append(f"epoch {epoch + 1}")
        images.append(shown(found, data.source))
    return titles, images


def batch_of(config: Config, data: TrainData, numbers: Tensor, epoch: int, place: Tensor) -> Batch:
    """The images of an order at `numbers` in `epoch`, repeated as `place` (batch,) says."""
    device = data.world.device
    indices = images_of(numbers, len(data))[place]
    labels = data.source.labels[indices].to(device)
    if data.where == "stream":
        pixels = take(loaded(config, data, numbers, epoch), place)
    else:
        pixels = take(data.pixels, indices.to(data.home))
    return Batch(pixels.to(device), labels, indices.to(device))


def loaded(config: Config, data: TrainData, numbers: Tensor, epoch: int | None = None) -> Tensor:
    """Images of an order: (count, side, side, channels) uint8 or uint16.

    As they are, or as workers crop them in `epoch`.
    """
    crops = config.augment if data.cropper == "workers" and epoch is not None else None
    samples = Samples(data.source, config.data, config.seed, crops)
    pixels = data.source.empty(len(numbers), samples.size)
    for row, reason in samples.fill(pixels, epoch or 0, numbers.numpy()).items():
        data.note(int(images_of(numbers[row], len(data))), reason)
    return pixels


def shown(images: Tensor, source: Source) -> Tensor:
    """Normalized images in colors to look at, of which the first channels are red, green and blue.

    (count, channels, side, side) float32 -> (count, side, side, 3) uint8.
    """
    pixels = denormalize(images, source).cpu()
    return pixels[..., :3] if pixels.shape[3] > 2 else pixels[..., :1].expand(-1, -1, -1, 3)


def draw(titles: list[str], rows: list[Tensor]) -> Image.Image:
    """A picture of rows of images, all (columns, side, side, 3) uint8, behind their titles.

    The first row has the largest images.
    """
    columns, side = rows[0].shape[:2]
    size = TITLE_WIDTH + columns * (side + GAP), len(rows) * (side + GAP)
    page = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(page)
    for row, (title, images) in enumerate(zip(titles, rows, strict=True)):
        top = row * (side + GAP)
        pen.text((GAP, top + max(0, side - LETTER_HEIGHT) // 2), title, "black")
        for column, image in enumerate(images):
            page.paste(Image.fromarray(image.numpy()), (TITLE_WIDTH + column * (side + GAP), top))
    return page
