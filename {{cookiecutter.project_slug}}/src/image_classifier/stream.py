"""Images that workers decode, crop and augment, anew for every batch.

A batch is assembled once, in place: workers fill the rows of a slot of shared memory, which the
device copies from. What becomes of an image depends on the seed, the epoch and its number alone, so
any number of workers makes the same.
"""

import contextlib
import gc
import math
import mmap
import os
import select
import signal
import struct
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue

import numpy as np
import torch
from torch import Tensor

from . import seeding
from .config import AugmentConfig, DataConfig
from .datasets.source import Source
from .decode import BOX_DRAWS, centre_crop, crop, pixels_to_keep, place_box, random_sides
from .machine import hand_back_memory

HUNG_SECONDS = 300  # without a sign of life from any worker
PART_SIZES = (8, 64)  # fewest and most images that a worker is given at once
TASK = struct.Struct("<4q")  # slot, first and last row, epoch
STOP = TASK.pack(-1, 0, 0, 0)  # in place of a task
ANSWER = struct.Struct("<4q?d")  # the task, whether it failed, and the seconds that it took
ANSWERS_AT_ONCE = 64
# A worker is forked where that is safe, and so starts at once and shares what it reads. Elsewhere
# it is a thread: decoding and cropping do not hold the interpreter's lock.
FORKS = sys.platform == "linux"


class Samples:
    """Single images as training sees them: decoded, cropped to the model's size, uint8."""

    def __init__(
        self, source: Source, data: DataConfig, seed: int = 0, augment: AugmentConfig | None = None
    ) -> None:
        """Samples of side `data.image_size` pixels, augmented if `augment` is given."""
        self.source, self.size, self.seed = source, data.image_size, seed
        self.keep = pixels_to_keep(data, data.image_size)
        # Where workers crop they flip too; else the device does both, to all images of a batch.
        crops = augment if augment and augment.crop == "resized" else None
        self.min_area, self.flip = (crops.min_area, crops.flip) if crops else (None, "none")
        alternates = self.flip == "alternating"
        self.sides = seeding.sides_at(seed, len(source)).numpy() if alternates else None
        # Built before workers are forked: each would take seconds to import torchvision.
        self.policy = build_policy(augment.policy) if augment else None

    def fill(self, out: Tensor, epoch: int, indices: np.ndarray) -> None:
        """Write the images at `indices` as `epoch` has them to `out`, (count, size, size, 3) uint8.

        Raises:
            UserError: if the file of one can't be read, naming it.
        """
        if self.min_area is not None:
            key = (seeding.SAMPLE, self.seed, epoch)
            draws = torch.from_numpy(seeding.draws_at(*key, indices=indices, count=BOX_DRAWS + 1))
            sides = random_sides(draws[:, 2:-1], self.min_area).tolist()
            corners, flips = draws[:, :2].tolist(), draws[:, -1].tolist()
        for row, (index, place) in enumerate(zip(indices.tolist(), out, strict=True)):
            pixels = self.source.read(index, self.keep)
            if self.min_area is None:
                centre_crop(pixels, place)
            else:
                box = place_box(sides[row], corners[row], *pixels.shape[:2])
                crop(pixels, box, place, self.is_mirrored(index, epoch, flips[row]))
            if self.policy is not None:
                with seeding.seeded(seeding.SAMPLE, self.seed, epoch, index, 1):
                    changed = self.policy(place.permute(2, 0, 1))
                place.copy_(changed.permute(1, 2, 0))

    def is_mirrored(self, index: int, epoch: int, draw: float) -> bool:
        """Whether an image is mirrored in `epoch`; `draw` is from 0 to 1."""
        if self.sides is not None:
            return bool(self.sides[index]) != epoch % 2
        return self.flip == "random" and draw < 0.5


class Stream:
    """A ring of batches in shared memory, and the workers that fill it."""

    def __init__(
        self, samples: Samples, batch_size: int, workers: int, prefetch_batches: int, pin: bool
    ) -> None:
        """Batches of up to `batch_size`; page-locked if `pin`, for a GPU to copy from."""
        self.samples, self.num_workers, self.pin = samples, workers, pin
        # Small enough that every worker has two to do, ahead of time; each costs as much as to crop
        # a few images, as what it begins with is in no cache any more.
        share = batch_size * prefetch_batches // max(1, 2 * workers)
        self.part_size = min(max(share, PART_SIZES[0]), PART_SIZES[1])
        slots = 1 + (prefetch_batches if workers else 0)  # one is in use
        size = samples.size
        self.images = shared((slots, batch_size, size, size, 3), torch.uint8)
        self.numbers = shared((2, slots, batch_size), torch.int64)  # labels, and indices
        self.num_pending = 0  # images that workers still have to answer for
        self.num_filled, self.busy_seconds = 0, 0.0  # since the beginning, over all workers
        self.is_started = False
        self.pids: list[int] = []
        self.locked: list[Tensor] = []  # what is page-locked

    def batches(
        self, places: Iterable[tuple[int, Tensor]]
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Images, labels and indices of a batch for each of `places`: its epoch and indices.

        (batch, size, size, 3) uint8 and twice (batch,) int64, all in host memory. They are
        overwritten after the next batch is asked for.

        Raises:
            UserError: if an image can't be read.
            RuntimeError: if a worker was killed, or none does anything any more.
        """
        if not self.is_started:
            self.start()
        while self.num_pending:  # of an earlier call that was given up
            self.collect()
        places = iter(places)
        free, line = deque(range(len(self.images))), deque()
        left = dict.fromkeys(free, 0)  # rows of each slot that are to be filled
        while True:
            while free and (place := next(places, None)) is not None:
                slot = free.popleft()
                left[slot] = self.ask(slot, *place)
                line.append((slot, len(place[1])))
            if not line:
                return
            slot, count = line.popleft()
            while left[slot]:
                for answered, rows in self.collect():
                    left[answered] -= rows
            labels, indices = self.numbers[:, slot, :count]
            yield self.images[slot, :count], labels, indices
            free.append(slot)

    def start(self) -> None:
        """Let the workers begin to wait for tasks."""
        self.is_started = True
        if self.num_workers and FORKS:
            hand_back_memory()  # or each worker has what building an index took for a while
            self.tasks, send = os.pipe()
            receive, self.answers = os.pipe()
            self.pids = [self.fork(send, receive) for _ in range(self.num_workers)]
            os.close(self.tasks)
            os.close(self.answers)
            os.set_blocking(receive, False)
            self.ends = send, receive
            self.send: Callable[[bytes], object] = lambda task: os.write(send, task)
            self.receive: Callable[[], bytes] = lambda: self.read_pipe(receive)
        else:
            tasks, answers = SimpleQueue[bytes](), SimpleQueue[bytes]()
            self.send, self.receive = tasks.put, answers.get
            for _ in range(self.num_workers):
                threading.Thread(
                    target=self.work, args=(tasks.get, answers.put), daemon=True
                ).start()
        if self.pin:
            self.locked = [tensor for tensor in (self.images, self.numbers) if page_lock(tensor)]

    def close(self) -> None:
        """Let the workers end."""
        for tensor in self.locked:
            torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())
        self.locked = []
        if self.is_started:
            # Closed pipes would not do: workers of other streams that were forked later hold them.
            with contextlib.suppress(BrokenPipeError):  # none is left
                for _ in range(self.num_workers):
                    self.send(STOP)
        for pid in self.pids:
            with contextlib.suppress(ChildProcessError):  # it was ended before
                os.waitpid(pid, 0)
        if self.pids:
            for end in self.ends:
                os.close(end)
        self.pids = []

    def fork(self, *parents_ends: int) -> int:
        """Start a worker process, which ends with this one or when it is told to; its number."""
        with warnings.catch_warnings():
            # Python warns that locks of other threads stay locked: a worker takes none of theirs.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid:
            return pid
        try:
            # While any process can still write tasks, their end does not show.
            for end in parents_ends:
                os.close(end)
            # Signals to the whole group are for the main process, which says what was saved.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            gc.freeze()  # a collection would write to, and so copy, every object that is shared
            self.work(
                lambda: os.read(self.tasks, TASK.size), lambda text: os.write(self.answers, text)
            )
        except BrokenPipeError:
            pass  # the main process was killed, and needs no more images
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(0)  # never into what the main process would do next

    def work(self, get: Callable[[], bytes], put: Callable[[bytes], object]) -> None:
        """Fill rows of slots as long as there are tasks: the life of a worker."""
        torch.set_num_threads(1)
        while (task := get()) not in (b"", STOP):
            slot, first, last, epoch = TASK.unpack(task)
            began = time.perf_counter()
            failed = False
            try:
                self.fill(slot, first, last, epoch)
            except Exception:
                failed = True
            seconds = time.perf_counter() - began
            put(ANSWER.pack(slot, first, last, epoch, failed, seconds))

    def fill(self, slot: int, first: int, last: int, epoch: int) -> None:
        """Fill some rows of a slot."""
        indices = self.numbers[1, slot, first:last].numpy()
        self.samples.fill(self.images[slot, first:last], epoch, indices)

    def ask(self, slot: int, epoch: int, indices: Tensor) -> int:
        """Have a slot filled; how many of its rows workers will answer for."""
        count = len(indices)
        self.numbers[0, slot, :count] = self.samples.source.labels[indices]
        self.numbers[1, slot, :count] = indices
        if not self.num_workers:
            began = time.perf_counter()
            self.fill(slot, 0, count, epoch)
            self.busy_seconds += time.perf_counter() - began
            self.num_filled += count
            return 0
        for first in range(0, count, self.part_size):
            self.send(TASK.pack(slot, first, min(first + self.part_size, count), epoch))
        self.num_pending += count
        return count

    def collect(self) -> list[tuple[int, int]]:
        """Wait for answers: the slot of each, and how many of its rows are filled."""
        filled = []
        for slot, first, last, epoch, failed, seconds in ANSWER.iter_unpack(self.receive()):
            if failed:
                self.fill(slot, first, last, epoch)  # fails here too, with the whole account of why
            self.num_pending -= last - first
            self.num_filled += last - first
            self.busy_seconds += seconds
            filled.append((slot, last - first))
        return filled

    def read_pipe(self, receive: int) -> bytes:
        """The next answers of worker processes, of which there may be several.

        Raises:
            RuntimeError: if one was killed, or none does anything any more.
        """
        end = time.monotonic() + HUNG_SECONDS
        while time.monotonic() < end:
            try:
                answers = os.read(receive, ANSWER.size * ANSWERS_AT_ONCE)
            except BlockingIOError:
                select.select([receive], [], [], 1)
            else:
                if answers:
                    return answers
                time.sleep(0.01)  # no worker is left: the system will soon know how they ended
            for pid in self.pids:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    number = os.waitstatus_to_exitcode(status)
                    how = f"by signal {-number} (out of memory?)" if number < 0 else "from within"
                    raise RuntimeError(f"a data worker (process {pid}) was ended {how}")
        raise RuntimeError(
            f"no image for {HUNG_SECONDS} s: a data worker hangs "
            "(a slow disk, or a file that never ends)"
        )


def shared(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in memory that forked workers share; unlike /dev/shm it has no limit of its own."""
    memory = mmap.mmap(-1, max(1, math.prod(shape) * dtype.itemsize))
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def page_lock(tensor: Tensor) -> bool:
    """Keep the memory of `tensor` in place, so that a GPU can copy from it by itself.

    False where the system refuses (`ulimit -l`): copies are as right, but wait.
    """
    code = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
    if int(code) == 0:
        return True
    forget_cuda_error()
    return False


def forget_cuda_error() -> None:
    """Let the next kernel not be blamed for a call before it that failed.

    CUDA keeps the error until somebody asks for it, and who starts a kernel does:
    https://github.com/pytorch/pytorch/issues/167414
    """
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda").add_(1)


def build_policy(name: str) -> Callable[[Tensor], Tensor] | None:
    """One of torchvision's augmentation policies for single images, (3, height, width) uint8."""
    if name == "none":
        return None
    from torchvision.transforms import v2

    return {"randaugment": v2.RandAugment, "trivialaugment": v2.TrivialAugmentWide}[name]()
