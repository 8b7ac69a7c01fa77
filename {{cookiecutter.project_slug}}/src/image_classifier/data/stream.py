"""Images that workers decode, crop and augment, anew for every batch.

A batch is assembled once, in place: workers fill the rows of a slot of shared memory, which the
device copies from. What becomes of an image does not depend on the worker: see `samples.py`.
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
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from ..config import FaultError, RunConfig
from ..runtime.machine import hand_back_memory
from ..runtime.signals import NUMBERS
from .bad_images import BadImages
from .samples import LEFT_OUT, Samples

GONE_SECONDS = 10.0  # in which the system surely says how a worker ended
PART_SIZES = (8, 64)  # fewest and most images that a worker is given at once
TASK = struct.Struct("<4q")  # slot, first and last row, epoch
STOP = TASK.pack(-1, 0, 0, 0)  # in place of a task
ANSWER = struct.Struct("<4q?d")  # the task, whether it failed, and the seconds that it took
ANSWERS_AT_ONCE = 64
# What lies in the pipes at any time, in tasks for each worker: two, and in all so many, which both
# pipes hold even where the system gives them a single page. So no write ever waits.
TASKS_EACH, TASKS_AT_ONCE = 2, 64
# By how a worker was ended.
HINTS = {
    "SIGKILL": " (out of memory? fewer --data.workers or a smaller --data.batch-size)",
    "SIGBUS": " (a file that it read through a memory map was cut short or is on a failing "
    "disk? `prepare` tests prepared images)",
}
# A worker is forked where that is safe, and so starts at once and shares what it reads. Elsewhere
# it is a thread: decoding and cropping do not hold the interpreter's lock.
FORKS = sys.platform == "linux"


class Stream:
    """A ring of batches in shared memory, and the workers that fill it."""

    def __init__(
        self,
        samples: Samples,
        batch_size: int,
        workers: int,
        prefetch_batches: int,
        pin: bool,
        *,
        bad_images: BadImages | None = None,
        timeout_seconds: float = RunConfig.timeout_seconds,
    ) -> None:
        """Batches of up to `batch_size`; page-locked if `pin`, for a GPU to copy from.

        Images that are skipped are told to `bad_images`; workers that give no sign of life for
        `timeout_seconds` are given up.
        """
        self.samples, self.num_workers, self.pin = samples, workers, pin
        self.bad_images, self.timeout_seconds = bad_images, timeout_seconds
        # Small enough that every worker has two to do, ahead of time; each costs as much as to crop
        # a few images, as what it begins with is in no cache any more.
        share = batch_size * prefetch_batches // max(1, 2 * workers)
        self.part_size = min(max(share, PART_SIZES[0]), PART_SIZES[1])
        slots, size = num_slots(workers, prefetch_batches), samples.size
        self.images = shared((slots, batch_size, size, size, 3), torch.uint8)
        # Labels, indices, and the indices that were asked for, where another image stands in.
        self.numbers = shared((3, slots, batch_size), torch.int64)
        self.num_pending = 0  # images that workers still have to answer for
        self.waiting = deque[bytes]()  # tasks that are not in the pipe yet
        self.num_tasks = 0  # that are, or are being done
        self.num_replaced = 0  # images that were skipped, since the beginning
        self.num_filled, self.busy_seconds = 0, 0.0  # since the beginning, over all workers
        self.is_started = False
        self.pids: list[int] = []
        self.ends: tuple[int, ...] = ()  # of the pipes to and from them
        self.locked: list[Tensor] = []  # what is page-locked

    def batches(
        self, places: Iterable[tuple[int, Tensor]]
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Images, labels and indices of a batch for each of `places`: its epoch and indices.

        (batch, size, size, 3) uint8 and twice (batch,) int64, all in host memory. They are
        overwritten after the next batch is asked for.

        Raises:
            UserError: if an image can't be read.
            FaultError: if a worker was killed, none does anything any more, or too many images are
                bad to be skipped.
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
            labels, indices, asked = self.numbers[:, slot, :count]
            if self.samples.is_skipping:
                asked = asked % len(self.samples.source)
                self.note(asked[indices != asked].tolist())
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
            self.send, self.receive = tasks.put, lambda: self.read_queue(answers)
            for _ in range(self.num_workers):
                threading.Thread(
                    target=self.work, args=(tasks.get, answers.put), daemon=True
                ).start()
        if self.pin:
            self.locked = [tensor for tensor in (self.images, self.numbers) if page_lock(tensor)]

    def close(self) -> None:
        """Let the workers end; at once, if nobody waits any more for what they do."""
        for tensor in self.locked:
            torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())
        self.locked = []
        if self.num_pending:
            self.kill()
        if self.is_started:
            # Closed pipes would not do: workers of other streams that were forked later hold them.
            with contextlib.suppress(BrokenPipeError):  # none is left
                for _ in range(self.num_workers):
                    self.send(STOP)
        for pid in self.pids:
            with contextlib.suppress(ChildProcessError):  # it was ended before
                os.waitpid(pid, 0)
        for end in self.ends:
            os.close(end)
        self.pids, self.ends = [], ()

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
            for number in NUMBERS:
                signal.signal(number, signal.SIG_IGN)
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
        self.write(self.images[slot, first:last], slot, first, last, epoch)

    def write(self, out: Tensor, slot: int, first: int, last: int, epoch: int) -> None:
        """Write the images for some rows of a slot to `out`, and the numbers of what stands in."""
        asked = self.numbers[2, slot, first:last].numpy()
        for row, index in self.samples.fill(out, epoch, asked).items():
            label = LEFT_OUT if index == LEFT_OUT else int(self.samples.source.labels[index])
            self.numbers[0, slot, first + row], self.numbers[1, slot, first + row] = label, index

    def note(self, skipped: list[int]) -> None:
        """Count images in whose place others stand.

        Raises:
            FaultError: if they are too many.
        """
        self.num_replaced += len(skipped)
        for index in skipped if self.bad_images else ():
            self.bad_images.note(index)

    def ask(self, slot: int, epoch: int, indices: Tensor) -> int:
        """Have a slot filled; how many of its rows workers will answer for."""
        count = len(indices)
        images = indices % len(self.samples.source)
        self.numbers[0, slot, :count] = self.samples.source.labels[images]
        self.numbers[1, slot, :count], self.numbers[2, slot, :count] = images, indices
        if not self.num_workers:
            began = time.perf_counter()
            self.fill(slot, 0, count, epoch)
            self.busy_seconds += time.perf_counter() - began
            self.num_filled += count
            return 0
        for first in range(0, count, self.part_size):
            self.waiting.append(TASK.pack(slot, first, min(first + self.part_size, count), epoch))
        self.num_pending += count
        self.send_tasks()
        return count

    def send_tasks(self) -> None:
        """Put tasks where workers take them, no more than can lie there.

        Raises:
            FaultError: if no worker is left.
        """
        most = max(TASKS_AT_ONCE, TASKS_EACH * self.num_workers)
        while self.waiting and self.num_tasks < most:
            try:
                self.send(self.waiting[0])
            except BrokenPipeError:
                raise self.end_of_a_worker(GONE_SECONDS) from None
            self.waiting.popleft()
            self.num_tasks += 1

    def collect(self) -> list[tuple[int, int]]:
        """Wait for answers: the slot of each, and how many of its rows are filled."""
        filled = []
        for slot, first, last, epoch, failed, seconds in ANSWER.iter_unpack(self.receive()):
            self.num_tasks -= 1
            self.num_pending -= last - first
            if failed:
                self.fill(slot, first, last, epoch)  # fails here too, with the whole account of why
            self.num_filled += last - first
            self.busy_seconds += seconds
            filled.append((slot, last - first))
        self.send_tasks()
        return filled

    def read_pipe(self, receive: int) -> bytes:
        """The next answers of worker processes, of which there may be several.

        Raises:
            FaultError: if one was killed, or none does anything any more.
        """
        end = time.monotonic() + self.timeout_seconds
        while time.monotonic() < end:
            try:
                answers = os.read(receive, ANSWER.size * ANSWERS_AT_ONCE)
            except BlockingIOError:
                select.select([receive], [], [], min(1, self.timeout_seconds))
                if (end_of_one := self.end_of_a_worker()) is not None:
                    raise end_of_one from None
            else:
                if not answers:  # no worker is left
                    raise self.end_of_a_worker(GONE_SECONDS)
                return answers
        raise self.hang()

    def read_queue(self, answers: SimpleQueue[bytes]) -> bytes:
        """The next answer of worker threads.

        Raises:
            FaultError: if none does anything any more.
        """
        try:
            return answers.get(timeout=self.timeout_seconds)
        except Empty:
            raise self.hang() from None

    def end_of_a_worker(self, patience_seconds: float = 0) -> FaultError | None:
        """What to raise if a worker has ended, which is looked for until patience ends."""
        end = time.monotonic() + patience_seconds
        while True:
            for pid in self.pids:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self.pids.remove(pid)
                    self.kill()
                    code = os.waitstatus_to_exitcode(status)
                    name = signal.Signals(-code).name if code < 0 else ""
                    how = f"by {name}{HINTS.get(name, '')}" if name else "from within"
                    return FaultError(
                        f"a data worker (process {pid}) was ended {how}; "
                        "the same command goes on from the last save"
                    )
            if time.monotonic() > end:
                return FaultError("the data workers have gone") if patience_seconds else None
            time.sleep(0.01)

    def hang(self) -> FaultError:
        """What to raise if no worker gives a sign of life."""
        self.kill()
        return FaultError(
            f"no image for {self.timeout_seconds:g} s: a data worker hangs (a slow disk, or a file "
            "that never ends); the same command goes on from the last save, and "
            "--run.timeout-seconds sets how long to wait"
        )

    def kill(self) -> None:
        """End worker processes that may hang, or wait for one that is gone.

        They are not waited for: one that a dead disk holds does not even end by this.
        """
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
        self.pids = []


def num_slots(workers: int, prefetch_batches: int) -> int:
    """Batches that a ring has: one is in use, and others are filled if there are workers."""
    return 1 + (prefetch_batches if workers else 0)


def ring_bytes(batch_size: int, size: int, slots: int) -> int:
    """Memory that a ring of batches takes."""
    return slots * batch_size * (3 * size**2 + 3 * torch.int64.itemsize)


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
