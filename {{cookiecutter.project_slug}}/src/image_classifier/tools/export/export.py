"""Write a trained model as files that do not need this package, each verified against the model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...checkpoints import LoadedModel, load_model
from ...config import ComputeConfig
from ...data import BadImageError, Source, fit_square, open_dataset
from ...errors import FaultError, UserError
from ...extensions import functions
from ...metrics import counted_and_correct, metric_text
from ...precision import Precision
from ...runtime.distributed import join_world
from ...runtime.files import lock_file, remove_leftovers, write_whole
from .command import ExportOptions
from .export_graph import ExportModule, resized_square
from .formats import FORMATS, Predict, check_libraries

BATCH = 7  # images that are predicted together
ROUNDED = 2  # by so much rounding changes a resized value: by 1 in each of two passes
TIE = 0.01  # a probability may differ by so much where rounding of pixels changes the answer


def export(options: ExportOptions) -> None:
    """Write the best weights of `options.run` in each format of `options.format`.

    Raises:
        UserError: if there is no such run, its images cannot be read, a library is missing, or
            torch cannot write the network so.
        FaultError: if a file cannot be written, or predicts otherwise than the model, by more than
            the rounding of resized pixels explains.
    """
    if "onnx" in options.format:
        check_libraries()
    # Plain float32 on the CPU, in the usual memory format: channels_last is for training only.
    compute = ComputeConfig(device="cpu", channels_last=False)
    with join_world(compute) as world:
        trained = load_model(options.run, compute, world)
        exact = Precision("fp32", compute, trained.config.optim, world.device)
    trained = replace(trained, precision=exact)
    torch.set_float32_matmul_precision("highest")  # some processors round on the way otherwise
    data = trained.config.data
    data = replace(data, root=options.root or data.root, image_size=data.eval_size)
    source = trained.check_images(open_dataset(data, options.split), options.split)
    run = Path(options.run)
    home = run if run.is_dir() else run.parent
    above = home.absolute().parent
    if home.absolute().name == "checkpoints" and (above / "config.json").is_file():
        home = above
    folder = Path(options.out or home / "export")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".model.lock").open("w")
        with suppress(PermissionError):  # another user's
            Path(lock.name).chmod(0o666)  # for all who may write to the folder
    except OSError as error:
        raise UserError(f"cannot write to {str(folder)!a}: {error.strerror}") from error
    with lock:
        if lock_file(lock, f"another export is writing to {str(folder)!a}: take another --out"):
            remove_leftovers(folder, "model.*")
        write_all(options, trained, source, folder)


def write_all(options: ExportOptions, trained: LoadedModel, source: Source, folder: Path) -> None:
    """Write each file to `folder` once its predictions of images of `source` are compared."""
    source = replace(source, weights=None).thinned(min(options.images, len(source)))
    reference = predict_with_model(trained, source, options.raw)
    counted, right = reference.counted_and_correct(reference.probabilities)
    metric = "exact" if source.is_multi_label else "top1"
    score = metric_text(metric, float(right.sum() / counted.sum()))
    how = ", by the thresholds of labels" * bool(trained.decision.thresholds)
    print(
        f"weights {trained.origin} from {str(trained.path)!a}, in float32: "
        f"{score} of {len(reference.names):,} {options.split} images{how * source.is_multi_label}"
    )
    module = ExportModule(trained, options.raw).eval().requires_grad_(False)
    files = {}
    for name in filter(FORMATS.get, dict.fromkeys(options.format)):
        path = folder / f"model.{name}"
        with replacing(path):
            content, predict = files[name] = FORMATS[name](module)
            result = verify(predict, module, reference, options.tolerance)
        try:
            write_whole(path, lambda file, content=content: file.write(content))
        except OSError as error:
            raise FaultError(f"cannot write {str(path)!a}: {error.strerror}") from error
        print(f"{str(path)!a}: {len(content) / 1e6:,.1f} MB; {result}")
    for export_more in functions("exports", "export_more"):
        export_more(options, trained, reference, folder, files)


@contextmanager
def replacing(*paths: Path) -> Iterator[None]:
    """A block that makes what is written to `paths`.

    If it fails, files of that name go too: they may be of other weights.
    """
    try:
        yield
    except Exception:
        for path in paths:
            path.unlink(missing_ok=True)
        raise


class Reference(NamedTuple):
    """Real images as an exported file takes them, and the predictions of the model itself."""

    read: Callable[[int], Tensor]  # one of them: (1, ...); anew, as memory holds few large images
    squares: list[Tensor]  # the same as evaluation resizes them: (1, side, side, channels)
    probabilities: Tensor  # (count, classes) float32
    names: list[str]  # of the images
    labels: Tensor  # of the images, as those of a source
    to_probabilities: Callable[[Tensor], Tensor]  # of what a file gives: logits if it is raw
    to_answers: Callable[[Tensor], Tensor]  # of probabilities: (count, ...), what a user acts on

    @property
    def inputs(self) -> Iterator[Tensor]:
        """Each image as a file takes it."""
        return map(self.read, range(len(self.names)))

    @property
    def batch(self) -> Tensor:
        """The first images as squares, repeated if there are fewer: (BATCH, ...)."""
        return torch.cat([self.squares[n % len(self.squares)] for n in range(BATCH)])

    def counted_and_correct(self, probabilities: Tensor) -> tuple[Tensor, Tensor]:
        """Which images count, and which answers are right: (count,) bool."""
        answers = self.to_answers(probabilities)
        return counted_and_correct(answers if self.labels.ndim > 1 else answers[:, 0], self.labels)


@torch.inference_mode()
def predict_with_model(trained: LoadedModel, source: Source, is_raw: bool) -> Reference:
    """Predict all images of `source` that can be read with the code of evaluation."""
    data = trained.config.data
    squares = []
    probabilities = []
    kept = []
    for index in range(len(source)):
        try:
            pixels = source.read(index)
        except BadImageError:
            continue
        square = source.empty(1, data.eval_size)
        fit_square(pixels, square[0], data.fit, trained.mean)
        planes = square.permute(0, 3, 1, 2)
        squares.append(trained.normalize(planes) if is_raw else square)
        logits = trained.model(squares[-1]) if is_raw else trained.logits(planes)
        probabilities.append(trained.probabilities(logits))
        kept.append(index)
    if not kept:
        raise UserError("there are no images that can be read, to verify the files with")

    def to_answers(shares: Tensor) -> Tensor:
        if source.is_multi_label:
            return trained.decision.has_label(shares).to(torch.int8)
        return torch.stack((shares.argmax(1), trained.decision.is_sure(shares)), dim=1)

    names = [source.name(index) for index in kept]
    given_to = trained.probabilities if is_raw else torch.Tensor.float
    read = squares.__getitem__ if is_raw else lambda number: source.read(kept[number])[None]
    shares = torch.cat(probabilities)
    return Reference(read, squares, shares, names, source.labels[kept], given_to, to_answers)


@torch.inference_mode()
def verify(predict: Predict, module: ExportModule, reference: Reference, tolerance: float) -> str:
    """Compare a file with the model, image by image and on a batch: the result, with a warning.

    Two halves of a graph can differ from evaluation: the network, which is to be within
    `tolerance`, and resizing, which may round values of pixels otherwise. Where that changes
    probabilities, the warning says so; where it changes an answer that is no tie, it is a fault.

    Raises:
        FaultError: if a probability differs by more than the two explain, or is not a number.
    """

    def shares(images: Tensor) -> Tensor:
        return reference.to_probabilities(predict(images))

    expected = reference.probabilities
    found = torch.cat([shares(images) for images in reference.inputs])
    difference = (found - expected).abs().amax(1)
    of_batch = (shares(reference.batch) - expected[torch.arange(BATCH) % len(expected)]).abs()
    wanted = reference.to_answers(expected)
    is_same = (reference.to_answers(found) == wanted).flatten(1).all(1)
    largest = torch.maximum(difference.max(), of_batch.max())
    what = "class" if wanted.dtype == torch.int64 else "labels"
    result = (
        f"probabilities within {largest.item():.2e} of the model's, the same {what} for "
        f"{int(is_same.sum()):,} of {len(expected):,} images"
    )
    worst = difference.nan_to_num(torch.inf).argsort(descending=True).tolist()
    outside = [index for index in worst if not difference[index] <= tolerance]  # nan, too
    reasons = {}
    for index in outside:
        if fault := blame(index, shares, module, reference, tolerance):
            reasons[reference.names[index]] = fault
        elif not is_same[index] and difference[index] > TIE:
            reasons[reference.names[index]] = "resizing, and its answer with it"
    if not of_batch.max() <= tolerance:
        reasons["a batch of images"] = f"the network, by {of_batch.max().item():.1e}"
    if reasons:
        name, fault = next(iter(reasons.items()))
        raise FaultError(
            f"not written, as its predictions differ: {result}; most for {name!a}, where it is "
            f"{fault}; --tolerance {tolerance:g}"
        )
    if not outside:
        return result
    return (
        f"{result}\nwarning: of {len(outside):,} images a probability differs by more than "
        f"{tolerance:g}, most for {reference.names[outside[0]]!a}: the graph rounds resized pixels "
        f"otherwise, by up to {ROUNDED} of {2**module.data.bits - 1:,}; on the same pixels the "
        "network agrees"
    )


def blame(
    index: int,
    shares: Callable[[Tensor], Tensor],
    module: ExportModule,
    reference: Reference,
    tolerance: float,
) -> str:
    """Which half of a file makes the prediction of an image differ; nothing if rounding does."""
    square = reference.squares[index]
    by_network = (shares(square)[0] - reference.probabilities[index]).abs().max()
    if not by_network <= tolerance:
        return f"the network, by {by_network.item():.1e} on the same pixels"
    data = module.data
    pixels = reference.read(index)
    near = resized_square(pixels, data.eval_size, data.fit, module.color).permute(0, 2, 3, 1)
    by_rounding = (near - square.float()).abs().max()
    by_file = (shares(near.to(square.dtype)) - shares(pixels)).abs().max()
    if by_rounding <= ROUNDED and by_file <= tolerance:
        return ""
    moved = f"pixels differ by {by_rounding.item():g} and probabilities by {by_file.item():.2e}"
    return f"resizing, of which {moved}, and not the network"
