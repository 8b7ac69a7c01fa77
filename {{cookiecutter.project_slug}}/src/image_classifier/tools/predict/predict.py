"""Predict the classes of images with a trained model; images are preprocessed as in evaluation."""

import hashlib
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from ...checkpoints import LoadedModel, load_model
from ...config import ComputeConfig
from ...errors import FaultError, UserError
from ...extensions import need_tool
from ...runtime.console import Progress, printable, say
from ...runtime.distributed import join_world
from ...runtime.out_of_memory import smaller_batch_on_oom
from .command import PredictOptions
from .embeddings import Embeddings
from .images import Images, list_files
from .output import FORMATS, SEPARATOR, Output, begun, check_free
from .rows import ABSTAIN, Row, judge, unread


def predict(options: PredictOptions, compute: ComputeConfig) -> int:
    """Label the images at `options.paths` with the model of `options.run`.

    Returns:
        The number of images that could be read.

    Raises:
        UserError: if there is no such model, nothing at a path, or no way to write `--out` or
            `--embeddings`.
        FaultError: if a worker or the disk fails; the rows that are written are kept.
    """
    out = Path(options.out) if options.out else None
    if out:
        check_free("--out", out, FORMATS, options.fresh)
    files = list_files(options.paths, sys.stdin.buffer, b"\0" if options.null else b"\n")
    if options.explain:
        need_tool("files", "explain", "--explain").open_folder(Path(options.explain), len(files))
    embeddings = None
    if options.embeddings:
        is_begun = out is not None and begun(out).get("--embeddings") == options.embeddings
        embeddings = Embeddings(Path(options.embeddings), files, options.fresh or is_begun)
    with join_world(compute) as world:
        if world.size > 1:
            raise UserError("predict is one process: start it without torchrun")
        trained = load_model(options.run, compute, world)
        if embeddings and hasattr(trained.model, "each_network"):
            raise UserError("--embeddings: an ensemble has no features; name one of its runs")
        if options.tta != "as-trained":
            trained.normalize.tta = options.tta
        options = replace(options, top_k=min(options.top_k, len(trained.classes)))
        images = Images(files, trained, options.batch_size, options.workers, world)
        advice = smaller_batch_on_oom("--batch-size", options.batch_size)
        with closing(images), advice, open_output(options, trained, images) as output:
            first = output.num_done if output else 0
            batches = predictions(trained, images, options, embeddings, first)
            if output:
                num_bad = write_rows(batches, trained, output, len(files), options.top_k)
            else:
                num_bad = print_rows(batches, trained, bool(options.embeddings or options.explain))
    if num_bad:
        where = f"; the column `error` of {str(out)!a} says why" if out else ""
        print(f"{num_bad:,} of {len(files):,} files cannot be read{where}", file=sys.stderr)
    return len(files) - num_bad


@contextmanager
def open_output(
    options: PredictOptions, trained: LoadedModel, images: Images
) -> Iterator[Output | None]:
    """A block with the file `--out`, which begins or is resumed; None if nobody wants it."""
    if not options.out:
        yield None
        return
    sizes_and_times = images.source.paths.stats().numpy().tobytes()
    command = {
        "weights": trained.digest,
        "images": images.source.fingerprint(),
        "files": hashlib.blake2b(sizes_and_times, digest_size=16).hexdigest(),
        "precision": trained.precision.name,
        "--embeddings": options.embeddings,
        "--top-k": options.top_k,
        "--batch-size": options.batch_size,
        "--tta": trained.normalize.tta,
    }
    if options.explain:  # rows that are there have their PNG, too
        command["--explain"] = options.explain
    # Features are written at the end, so those of rows from before a kill are lost.
    fresh = options.fresh or options.embeddings != ""
    with closing(Output(Path(options.out), command, options.batch_size, fresh)) as output:
        yield output


@torch.inference_mode()
def predictions(
    trained: LoadedModel,
    images: Images,
    options: PredictOptions,
    embeddings: Embeddings | None,
    first: int,
) -> Iterator[list[Row]]:
    """The rows of the images from number `first` on, a batch at a time; the rest in passing."""
    for start, batch in images.batches(first):
        if embeddings:
            logits, features = trained.features(batch.images)
            embeddings.add(start, features, images.errors)
        else:
            logits = trained.logits(batch.images)
        rows = judge(trained, logits, options.top_k)
        for number, row in enumerate(rows):
            index = start + number
            row["path"] = images.source.paths.relative(index).decode("utf-8", "backslashreplace")
            if index in images.errors:
                rows[number] = unread(row, images.errors.pop(index))
        if options.explain:
            heat = need_tool("files", "explain", "--explain")
            how = trained, batch.images, logits.argmax(1)
            heat.write_pictures(Path(options.explain), *how, rows, start)
        yield rows
    if embeddings:  # before --out, without which the same command starts over
        embeddings.save()


def print_rows(batches: Iterable[list[Row]], trained: LoadedModel, needs_all: bool) -> int:
    """Print a line for each image; returns how many cannot be read.

    A reader such as `head`, who has seen enough, ends it, unless all are needed otherwise.
    """
    num_bad = 0
    width = max(len(printable(name)) for name in trained.classes)
    for rows in batches:
        for row in rows:
            pairs = [(printable(p["label"]), f"{p['probability']:.1%}") for p in row["top"]]
            if row.get("decision") == ABSTAIN:
                pairs.insert(0, (ABSTAIN, ""))
            if row.get("labels") is not None:
                pairs.insert(0, (printable(SEPARATOR.join(row["labels"])), ""))
            (label, share), *others = pairs or [("", "")]
            more = ", ".join(map(" ".join, others))
            if row["error"]:
                more = f"cannot be read: {printable(row['error'])}"
            print(f"{label:<{width}} {share:>6}  {printable(row['path'])}  {more}".rstrip())
        sys.stdout.flush()
        num_bad += sum(row["label"] is None for row in rows)
        is_closed = isinstance(getattr(sys.stdout, "error", None), BrokenPipeError)
        if is_closed and not needs_all:
            break
    return num_bad


def write_rows(
    batches: Iterable[list[Row]], trained: LoadedModel, output: Output, count: int, top_k: int
) -> int:
    """Write the output file, after the rows that are there; returns how many cannot be read.

    Raises:
        FaultError: if a file cannot be written; the rows before are kept.
    """
    out = ascii(str(output.path))
    if output.num_done:
        print(f"{out}: {output.num_done:,} of {count:,} rows are there", flush=True)
    progress = Progress(count, output.num_done)
    try:
        for rows in batches:
            output.add(rows)
            progress.show(output.num_done)
        output.finish(top_k)
    except OSError as error:
        kept = f"{output.num_done:,} rows are kept; run the same command without --fresh to resume"
        raise FaultError(f"cannot write {out}: {error.strerror}; {kept}") from error
    say(f"{out}: {count:,} rows, with the weights {trained.origin} from {str(trained.path)!a}")
    return output.num_bad
