"""What a trained model says of images: files to labels, as fast as they can be decoded.

Images are decoded and cropped as for an evaluation, by the same workers, and get the same answers.
The device has the next batch to do while the rows of the last one are written.
"""

import shutil
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ...config import ComputeConfig, FaultError, UserError
from ...data import (
    PART_SIZES,
    Batch,
    CopyAhead,
    PathList,
    Samples,
    SharedMemoryLoader,
    Source,
    choose_depth,
    choose_workers,
    pins,
)
from ...evaluate import logits_of
from ...runtime.console import clock, is_reader_gone
from ...runtime.distributed import World, join_world
from ...runtime.printable import printable
from ...trained import Trained, open_trained
from .journal import FORMATS, Journal, check_out, open_journal
from .listing import list_files
from .rows import Labelled, Table

LIVE_SECONDS, LOG_SECONDS = 0.5, 10  # between lines of progress, on a terminal and in a log
MOST_CLASSES = 20  # in the summary


def predict(
    run: str,
    paths: Sequence[str],
    out: str,
    *,
    top_k: int,
    batch_size: int,
    workers: int | str,
    tta: str,
    separator: bytes,
    fresh: bool,
    compute: ComputeConfig,
) -> int:
    """Label the images at `paths` with the model of `run`; returns how many could be read.

    The answers go to the file `out`, or if that is empty to the screen.

    Raises:
        UserError: if there is no such model, nothing at a path, or no way to write `out`.
        FaultError: if a worker or the disk failed; the rows so far are kept.
    """
    if out:
        check_out(Path(out), fresh)
    files = list_files(paths, sys.stdin.buffer, separator)
    with join_world(compute) as world:
        if world.size > 1:
            raise UserError("predict is one process: start it without torchrun")
        trained = open_trained(run, compute, world)
        if tta != "as-trained":
            trained.normalize.tta = tta
        top_k = min(top_k, len(trained.classes))
        data = PredictData(files, trained, batch_size, workers, world)
        try:
            if not out:
                return to_screen(trained, data, top_k)
            identity = {
                "weights": trained.digest,
                "precision": trained.precision.name,
                "--top-k": top_k,
                "--batch-size": batch_size,
                "--tta": trained.normalize.tta,
            }
            rows = FORMATS[Path(out).suffix](trained.classes, top_k)
            with open_journal(Path(out), rows, files, identity, fresh) as journal:
                return to_file(journal, trained, data, top_k)
        except torch.OutOfMemoryError as error:
            raise FaultError(
                f"out of memory with {batch_size} images at once: give a smaller --batch-size"
            ) from error
        finally:
            data.close()


class PredictData:
    """Files to label, each once and in their order, as an evaluation of the model sees images."""

    def __init__(
        self, files: PathList, trained: Trained, batch_size: int, workers: int | str, world: World
    ) -> None:
        """In batches of `batch_size`, which are the same wherever one begins."""
        self.files, self.world = files, world
        self.batch_size = min(batch_size, len(files))
        data = trained.config.data
        data = replace(
            data,
            image_size=data.eval_size,
            batch_size=self.batch_size,
            workers=workers,
        )
        labels = torch.zeros(1, dtype=torch.int64).expand(len(files))  # nobody knows them
        source = Source(labels, trained.classes, paths=files)
        samples = Samples(source, data)
        self.workers, _ = choose_workers(data, samples, world)
        self.workers = min(self.workers, len(files) // PART_SIZES[0])
        depth, _ = choose_depth(data, self.workers, world)
        self.errors: dict[int, str] = {}  # why files can't be read, until their rows are written
        self.loader = SharedMemoryLoader(
            samples,
            self.batch_size,
            self.workers,
            depth,
            pins(world),
            note=self.errors.__setitem__,
        )
        self.waited_seconds = 0.0  # that the model stood still for want of a batch

    def batches(self, first: int) -> Iterator[tuple[int, Batch]]:
        """Batches on the device from the file `first` on, which begins one, and where each begins.

        Raises:
            FaultError: if a data worker was ended.
        """
        count, size = len(self.files), self.batch_size
        starts = range(first, count, size)
        places = ((0, torch.arange(start, min(start + size, count))) for start in starts)
        batches = CopyAhead(self.loader.batches(places), self.world)
        for start in starts:
            asked = time.perf_counter()
            batch = next(batches)
            self.waited_seconds += time.perf_counter() - asked
            yield start, batch

    def labelled(self, start: int, found: tuple[Tensor, ...]) -> Labelled:
        """What was found of a batch: (batch, top_k) float32 and int64."""
        probabilities, classes = found
        stop = start + len(probabilities)
        rows = [index - start for index in self.errors if start <= index < stop]
        return Labelled(
            paths=self.files.between(start, stop),
            classes=classes.tolist(),
            probabilities=probabilities.tolist(),
            errors={row: self.errors.pop(start + row) for row in sorted(rows)},
        )

    def close(self) -> None:
        """End the workers."""
        self.loader.close()


def label(trained: Trained, data: PredictData, top_k: int, first: int) -> Iterator[Labelled]:
    """Answers to the files from `first` on, a batch at a time, and each a batch late.

    So the device is at work while the caller writes. To be iterated in inference mode.
    """
    late: deque[tuple[int, Callable[[], tuple[Tensor, ...]]]] = deque()
    for start, batch in data.batches(first):
        logits = logits_of(trained.model, batch.images, trained.normalize, trained.precision)
        best = logits.softmax(1).topk(top_k)
        late.append((start, begin_copy((best.values, best.indices), data.world)))
        if len(late) > 1:
            earlier, wait = late.popleft()
            yield data.labelled(earlier, wait())
    for start, wait in late:
        yield data.labelled(start, wait())


def begin_copy(tensors: tuple[Tensor, ...], world: World) -> Callable[[], tuple[Tensor, ...]]:
    """Begin to copy from the device; the function that is returned waits for the copies."""
    is_pinned = pins(world)
    copies = tuple(
        torch.empty_like(tensor, device="cpu", pin_memory=is_pinned).copy_(
            tensor, non_blocking=is_pinned
        )
        for tensor in tensors
    )
    if not is_pinned:
        return lambda: copies
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> tuple[Tensor, ...]:
        copied.synchronize()
        return copies

    return wait


def to_screen(trained: Trained, data: PredictData, top_k: int) -> int:
    """Print a table; returns how many images could be read."""
    files, num_bad = data.files, 0
    longest = int(torch.diff(files.ends, prepend=files.ends.new_zeros(1)).max())
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    table = Table(trained.classes, longest, width)
    with torch.inference_mode():
        for labelled in label(trained, data, top_k, first=0):
            print(table.write(labelled), end="", flush=True)
            num_bad += len(labelled.errors)
            if is_reader_gone():
                break
    tell_bad(num_bad, len(files), "")
    return len(files) - num_bad


def to_file(journal: Journal, trained: Trained, data: PredictData, top_k: int) -> int:
    """Write a file, or go on with it, and say what is in it; how many images could be read."""
    out, first, count = ascii(str(journal.out)), journal.num_done, len(data.files)
    if first:
        print(f"{out}: {first:,} of {count:,} rows are there", flush=True)
    progress = Progress(data, first)
    with torch.inference_mode():
        for labelled in label(trained, data, top_k, first):
            journal.add(labelled)
            progress.tell(journal.num_done)
    journal.finish()
    progress.clear()
    print(counts_text(journal.counts), end="")
    print(
        f"{out}: {count:,} rows; {progress.speed(count)}; "
        f"weights of step {trained.step} from {str(trained.path)!a}"
    )
    tell_bad(journal.num_bad, count, f"; the column `error` of {out} says why")
    return count - journal.num_bad


class Progress:
    """A line every while: on a terminal in place of the last, in a log below it."""

    def __init__(self, data: PredictData, first: int) -> None:
        """Of `data`, whose images before `first` were done before."""
        self.data, self.first = data, first
        self.began = self.told = time.perf_counter()
        self.is_live = sys.stdout.isatty()

    def tell(self, done: int) -> None:
        """Print it, if it is time to: `done` images have their rows."""
        now = time.perf_counter()
        if now - self.told < (LIVE_SECONDS if self.is_live else LOG_SECONDS):
            return
        self.told, count = now, len(self.data.files)
        left = (now - self.began) / (done - self.first) * (count - done)
        line = f"{done:,} of {count:,} images; {self.speed(done)}; left {clock(left)}"
        self.clear()
        print(line, end="" if self.is_live else "\n", flush=True)

    def clear(self) -> None:
        """Make room for another line."""
        print("\r\033[K" if self.is_live else "", end="")

    def speed(self, done: int) -> str:
        """How fast it went up to here, and what the model waited for."""
        seconds = max(1e-9, time.perf_counter() - self.began)
        waited = self.data.waited_seconds / seconds
        return (
            f"{clock(seconds)}, {(done - self.first) / seconds:,.0f} images/s, "
            f"{waited:.0%} of the time without images"
        )


def counts_text(counts: Counter[str]) -> str:
    """How many images have which label, the most frequent first."""
    shown = [(printable(name), count) for name, count in counts.most_common(MOST_CLASSES) if count]
    width = max((len(name) for name, _ in shown), default=0)
    total = max(1, counts.total())
    lines = [f"  {name:<{width}} {count:>9,} {count / total:7.2%}" for name, count in shown]
    if len(counts) > MOST_CLASSES:
        lines.append(f"  and {len(counts) - MOST_CLASSES} classes that are rarer")
    return "".join(line + "\n" for line in lines)


def tell_bad(num_bad: int, count: int, where: str) -> None:
    """Say on standard error how many files could not be read."""
    if num_bad:
        print(f"{num_bad:,} of {count:,} files can't be read{where}", file=sys.stderr)
