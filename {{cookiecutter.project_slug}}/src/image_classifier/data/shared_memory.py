"""Batches of images that the workers of torch's `DataLoader` decode into shared memory.

A worker writes images straight into the rows of a slot, from which the device copies, and
returns a few numbers: no image is pickled, collated or copied on the way.
"""

import contextlib
import gc
import math
import mmap
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from multiprocessing.util import Finalize
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling

from ..config import RunConfig
from ..errors import FaultError, UserError
from ..runtime import platform, seeding
from .datasets.source import Source
from .samples import LEFT_OUT, Note, Samples

# No DataLoader sets its handler of SIGCHLD, which raises in any line of the main thread:
# `next_part` checks the workers itself.
signal_handling._SIGCHLD_handler_set = True
PART_SIZES = (8, 64)  # fewest and most images that a worker gets at once
POLL_SECONDS = 1.0  # between two checks that the workers are alive
HINTS = {  # by the signal that ended a worker
    "SIGKILL": " (out of memory? fewer --data.workers or a smaller --data.batch-size)",
    "SIGBUS": " (a memory-mapped file was cut short, or its disk fails?)",
}

refusals: list[str] = []  # why this process could not page-lock memory
HostBatch = tuple[Tensor, Tensor, Tensor]


class Part(NamedTuple):
    """Rows of a batch, which the sampler hands to a worker."""

    slot: int
    first: int  # row
    epoch: int
    indices: np.ndarray  # (count,) int64; the queue would put a tensor into shared memory


class Decoded(NamedTuple):
    """What a worker returns for a `Part`, beside the images in shared memory."""

    count: int
    seconds: float
    unreadable: dict[int, str]  # reasons, by row of the batch
    error: UserError | FaultError | None = None  # ends the run


class SlotWriter(Dataset):
    """Decodes images into their rows of a slot."""

    def __init__(self, samples: Samples, images: Tensor) -> None:
        """`images` is (slots, batch, size, size, channels), in shared memory."""
        self.samples = samples
        self.images = images

    def __getitem__(self, part: Part) -> Decoded:
        began = time.perf_counter()
        count = len(part.indices)
        rows = self.images[part.slot, part.first : part.first + count]
        try:
            unreadable = self.samples.fill(rows, part.epoch, part.indices)
        except (UserError, FaultError) as error:  # DataLoader would add a traceback to it
            return Decoded(0, 0.0, {}, error)
        reasons = {part.first + row: reason for row, reason in unreadable.items()}
        return Decoded(count, time.perf_counter() - began, reasons)


class PartSampler:
    """Splits each batch into parts, and gives it a free slot.

    DataLoader returns parts in order, and asks for at most `ahead` more parts than it returned. So
    while batch b is put together, the sampler is in batch b + ahead / (parts of a batch) at most.
    One slot more than that quotient, rounded up, and no slot is written while in use.
    """

    def __init__(self, indices: Tensor, labels: Tensor, source: Source, part_size: int) -> None:
        """`indices` and `labels` (slots, batch, ...) get those of images of `source`."""
        self.indices = indices
        self.labels = labels
        self.source = source
        self.part_size = part_size
        self.begin(())

    def begin(self, batches: Iterable[tuple[int, Tensor]]) -> None:
        """Start a pass over `batches`: the epoch and the indices of each."""
        self.batches = batches
        self.sampled = deque[tuple[int, int]]()  # slot and size of each batch ahead, in order
        self.num_done = 0  # batches that were put together

    def __iter__(self) -> Iterator[Part]:
        for number, (epoch, indices) in enumerate(self.batches):
            slot = number % len(self.indices)
            count = len(indices)
            assert number - self.num_done < len(self.indices), "a slot is still in use"
            images = seeding.images_of(indices, len(self.source))
            self.labels[slot, :count] = self.source.labels[images]
            self.indices[slot, :count] = images
            self.sampled.append((slot, count))
            drawn = indices.numpy()
            for first in range(0, count, self.part_size):
                yield Part(slot, first, epoch, drawn[first : first + self.part_size])


class SharedMemoryLoader:
    """Slots for batches in shared memory, and the `DataLoader` whose workers fill them.

    Workers live from the first batch until `close`, over all epochs.
    """

    def __init__(
        self,
        samples: Samples,
        batch_size: int,
        workers: int,
        prefetch_batches: int,
        pin: bool,
        *,
        note: Note = lambda *_: None,
        timeout_seconds: float = RunConfig.timeout_seconds,
    ) -> None:
        """Allocate slots for batches of up to `batch_size` images.

        `workers` is the number of processes that decode `prefetch_batches` ahead of the batch in
        use (0: this process decodes); `pin`: page-lock the slots, for a GPU to copy from them.
        """
        self.samples = samples
        self.num_workers = workers
        self.pin = pin
        self.note = note
        self.timeout_seconds = timeout_seconds
        part_size, self.prefetch_factor, slots = part_sizes(batch_size, workers, prefetch_batches)
        shape = (slots, batch_size, samples.size, samples.size, samples.source.channels)
        self.images = shared(shape, samples.source.dtype)
        labels = samples.source.labels
        self.labels = shared((slots, batch_size, *labels.shape[1:]), labels.dtype)
        self.indices = shared((slots, batch_size), torch.int64)
        self.sampler = PartSampler(self.indices, self.labels, samples.source, part_size)
        self.num_filled = 0  # images, by all workers
        self.busy_seconds = 0.0  # of all workers together
        self.loader: DataLoader | None = None  # once started
        self.workers: list[multiprocessing.Process] = []
        self.locked: list[Tensor] = []  # what is page-locked

    def begin(self, places: Iterable[tuple[int, Tensor]]) -> Iterator[HostBatch]:
        """Begin a pass over the batches of `places`, which are epochs and indices.

        Returns images (batch, size, size, channels), labels as the source has them, and indices
        (batch,) int64 of each batch, in host memory that is overwritten after the next batch is
        asked for. An unreadable image is black and its label is `LEFT_OUT`.

        Raises:
            UserError: if an image is unreadable and `note` raises it.
            FaultError: if a worker was killed or hangs, or too many images are unreadable.
        """
        self.sampler.begin(places)
        try:
            self.parts = iter(self.loader) if self.loader is not None else None
        except RuntimeError:  # a worker has ended, or is busy with a pass that was given up
            self.close()
        if self.loader is None:
            self.start()
        return self.batches()

    def batches(self) -> Iterator[HostBatch]:
        """The batches of the pass, each once all of its parts are there."""
        left = 0
        while (part := self.next_part()) is not None:
            if not left:
                slot, count = self.sampler.sampled.popleft()
                left = count
            self.num_filled += part.count
            self.busy_seconds += part.seconds
            for row, reason in part.unreadable.items():
                self.note(int(self.indices[slot, row]), reason)
                self.labels[slot, row] = LEFT_OUT
            left -= part.count
            if not left:
                self.sampler.num_done += 1
                yield tuple(t[slot, :count] for t in (self.images, self.labels, self.indices))

    def start(self) -> None:
        """Start the workers on the current pass."""
        options = {}
        if self.num_workers:
            platform.hand_back_memory()  # freed memory of the parent would count for each worker
            options = {
                "prefetch_factor": self.prefetch_factor,
                "persistent_workers": True,
                "timeout": POLL_SECONDS,
                "worker_init_fn": begin_worker,
                "multiprocessing_context": platform.START_METHOD,
            }
        with warnings.catch_warnings():
            # These warn of locks in a fork (a worker takes none) and of more workers than cores.
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            self.loader = DataLoader(
                SlotWriter(self.samples, self.images),
                batch_size=None,
                sampler=self.sampler,
                num_workers=self.num_workers,
                generator=torch.Generator(),  # nothing uses the seeds it draws: see `seeding`
                **options,
            )
            others = multiprocessing.active_children()
            try:
                self.parts = iter(self.loader)
            except BaseException as error:
                # Those that have started: they ignore SIGTERM, by which Python would end them.
                # Torch then complains that it could not, as its iterator is half made.
                kill_all([w for w in multiprocessing.active_children() if w not in others])
                # An assertion is Python's, of a process of `multiprocessing.Pool`.
                if not isinstance(error, (OSError, RuntimeError, AssertionError)):
                    raise
                raise FaultError(
                    f"cannot start {self.num_workers} data workers: {error}; "
                    "run the same command with fewer --data.workers, or with 0, which needs none"
                ) from error
        # A worker that is killed may hold the lock of the event by which DataLoader ends workers:
        # this process would wait for it for ever. `kill_all` ends them instead. The event stays, as
        # workers that are not forked look it up by its name.
        self.their_event = getattr(self.parts, "_workers_done_event", None)
        self.parts._workers_done_event = threading.Event()
        self.workers = getattr(self.parts, "_workers", [])  # those that were killed meanwhile, too
        # They ignore SIGTERM, by which DataLoader, and Python at its exit, would end them.
        Finalize(self, kill_all, args=(self.workers,), exitpriority=1)
        if self.pin:
            slots = self.images, self.labels, self.indices
            self.locked = [tensor for tensor in slots if page_lock(tensor)]

    def next_part(self) -> Decoded | None:
        """The next part in order; None after the last."""
        end = time.monotonic() + self.timeout_seconds
        while True:
            try:
                part = next(self.parts, None)
            except RuntimeError as error:
                for worker in self.workers:
                    if worker.exitcode is not None:
                        self.close()
                        raise ended(worker) from None
                if not str(error).startswith("DataLoader timed out"):
                    raise
            else:
                if part is not None and part.error is not None:
                    raise part.error
                return part
            if time.monotonic() >= end:
                self.close()
                raise FaultError(
                    f"no image for {self.timeout_seconds:g} s: a data worker hangs (a slow disk, "
                    "or a file that never ends); run the same command to resume, and "
                    "--run.timeout-seconds sets how long to wait"
                )

    def close(self) -> None:
        """Kill the workers, as one that hangs would never end by itself."""
        kill_all(self.workers)
        if self.locked:
            with contextlib.suppress(RuntimeError):  # of a kernel: the error that ends the run
                torch.cuda.synchronize()  # a batch may still be on its way
        for tensor in self.locked:
            torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())
        self.loader = self.parts = None
        self.workers = []
        self.locked = []


def kill_all(workers: list[multiprocessing.Process]) -> None:
    """Kill worker processes, whatever they do, and reap them."""
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.join(timeout=1.0)  # one that waits for a dead disk cannot be killed


def begin_worker(_: int) -> None:
    """Set up a worker process, to which DataLoader gives one thread."""
    # The main process handles signals to the whole group.
    for number in platform.STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    gc.freeze()  # a collection would write to, and so copy, every shared object
    # DataLoader looks every 5 s, and in vain for a worker of a forkserver, which outlives the run.
    main = multiprocessing.parent_process()
    threading.Thread(target=lambda: (main.join(), os._exit(1)), daemon=True).start()


def ended(worker: multiprocessing.Process) -> FaultError:
    """The error for a worker that has ended."""
    code = worker.exitcode or 0
    name = signal.Signals(-code).name if code < 0 else ""
    how = f"was ended by {name}{HINTS.get(name, '')}" if name else f"ended with exit code {code}"
    return FaultError(f"a data worker (process {worker.pid}) {how}; run the same command to resume")


def part_sizes(batch_size: int, workers: int, prefetch_batches: int) -> tuple[int, int, int]:
    """How batches are divided: images per part, parts ahead per worker, and slots.

    Parts are small enough that each worker has two ahead, but each costs as much as cropping a few
    images, because it starts with cold caches.
    """
    if not workers:
        return batch_size, 0, 1
    share = batch_size * prefetch_batches // (2 * workers)
    part_size = min(max(share, PART_SIZES[0]), PART_SIZES[1])
    parts = math.ceil(batch_size / part_size)
    prefetch_factor = max(1, prefetch_batches * parts // workers)
    return part_size, prefetch_factor, 1 + math.ceil(prefetch_factor * workers / parts)


def shared(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in memory that workers share."""
    if platform.START_METHOD != "fork":
        return torch.zeros(shape, dtype=dtype).share_memory_()
    # It does not count against /dev/shm, which often has only 64 MB in a container.
    memory = mmap.mmap(-1, max(1, math.prod(shape) * dtype.itemsize))
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def page_lock(tensor: Tensor) -> bool:
    """Page-lock `tensor` for asynchronous copies; False if that is refused: see `refusals`."""
    cuda = torch.cuda.cudart()
    code = cuda.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
    if int(code) == 0:
        return True
    refusals.append(f"cudaHostRegister: error {int(code)}, {cuda.cudaGetErrorString(code)}")
    forget_cuda_error()
    return False


def forget_cuda_error() -> None:
    """Clear the error of a failed CUDA call, or the next kernel reports it.

    https://github.com/pytorch/pytorch/issues/167414
    """
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda").add_(1)
