"""Workers: what they decode is right, they are few enough, and their end is never a riddle."""

import contextlib
import json
import multiprocessing
import os
import pickle
import re
import resource
import signal
import time
from contextlib import closing
from multiprocessing import active_children
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest.mock import MagicMock, Mock, call

import pytest
import torch
from conftest import changed, is_alive, needs_fork, run_alone, start, wait_for
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from image_classifier.config import DataConfig
from image_classifier.data import (
    autotune,
    batch,
    shared_memory,
    worker_count,
)
from image_classifier.data.batch import (
    copy_stream,
    prefetched,
)
from image_classifier.data.datasets import open_dataset
from image_classifier.data.datasets.paths import PathList
from image_classifier.data.datasets.source import Source
from image_classifier.data.loader import TrainData
from image_classifier.data.samples import LEFT_OUT, Samples
from image_classifier.data.shared_memory import SharedMemoryLoader
from image_classifier.errors import FaultError, UserError
from image_classifier.runtime import platform
from image_classifier.runtime.distributed import World

CPU = World(torch.device("cpu"))


@pytest.fixture
def streamed(on_photos):
    """Photographs that one worker decodes, four to a batch."""
    return changed(on_photos, data__where="stream", data__workers=1, augment__crop="resized")


def test_a_pass_that_is_given_up_leaves_the_next_one_right(streamed, monkeypatch):
    monkeypatch.setattr(shared_memory, "POLL_SECONDS", 0.2)
    data = TrainData(streamed, CPU)
    first = next(data.batches(0, 6)).images.clone()
    next(data.batches(2, 6))
    assert torch.equal(next(data.batches(0, 6)).images, first)
    os.kill(data.loader.workers[0].pid, signal.SIGSTOP)  # as one that is slow
    assert torch.equal(next(data.batches(0, 6)).images, first)
    data.close()


def killed_with_workers(config, path):
    """Begin to stream, tell the workers' numbers, and be killed while they work."""
    os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), 2)
    data = TrainData(changed(config, data__workers=2), CPU)
    data.loader.samples.fill = lambda *_: (time.sleep(0.1), {})[1]
    next(data.batches(0, 100))
    os.write(2, json.dumps([worker.pid for worker in data.loader.workers]).encode())
    os.kill(os.getpid(), signal.SIGKILL)


@needs_fork
def test_workers_end_in_silence_with_the_process_that_they_serve(streamed, tmp_path):
    said = tmp_path / "said"
    assert run_alone(killed_with_workers, streamed, said) == (-signal.SIGKILL, None)
    # What was said is their numbers and nothing else.
    wait_for(lambda: not any(map(is_alive, json.loads(said.read_text()))))


def left_open(config):
    """Stream a batch, and return with workers at work, as a script that ends by an error."""
    shared_memory.left = TrainData(config, CPU)
    next(shared_memory.left.batches(0, 100))
    return [worker.pid for worker in shared_memory.left.loader.workers]


def test_a_program_that_leaves_its_data_open_ends(streamed):
    process, result = start(left_open, streamed)
    process.join(30)  # workers ignore the signal by which Python ends them, and waits for ever
    process.kill()
    assert process.exitcode == 0
    wait_for(lambda: not any(map(is_alive, pickle.loads(result.recv_bytes()))))


def test_a_process_that_may_start_no_workers_says_that_none_are_needed(streamed, monkeypatch):
    data = TrainData(changed(streamed, data__workers=2), CPU)
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # as in a Pool
    with pytest.raises(FaultError, match=r"daemonic .* fewer --data\.workers, or with 0, which"):
        next(data.batches(0, 1))


@needs_fork  # Linux, which has `/proc/self/maps`
def test_workers_copy_no_names_of_files_and_take_no_shared_memory_of_docker():
    count = 400_000
    paths = PathList("photos", (b"ant/%08d.jpg" % number for number in range(count)))
    samples = Samples(
        Source(torch.zeros(count).long(), ("ant",), paths=paths), DataConfig(image_size=8)
    )
    picked, copied = torch.arange(0, count, 16), {}  # some of each page, whatever it holds

    def look_up(_, epoch, asked):
        assert all(samples.source.paths[index] for index in (asked * epoch).tolist())
        return {0: (epoch, resource.getrusage(resource.RUSAGE_SELF).ru_minflt)}  # as a reason

    samples.fill = look_up
    note = lambda _, pages: copied.update([pages])  # noqa: E731
    loader = SharedMemoryLoader(samples, len(picked), 1, 1, pin=False, note=note)
    list(loader.begin([(0, picked), (1, picked)]))  # one name, and then all
    assert copied[1] - copied[0] < 3200  # pages; a list of names would be 6400
    assert not re.search(r"/dev/shm/(?!sem\.)", Path("/proc/self/maps").read_text())
    loader.close()


def test_slots_take_the_memory_that_there_is(streamed, monkeypatch):
    of_a_batch = 4 * 3 * 32**2
    for batches, depth in ((1000, 4), (5, 1)):  # free, in batches; of which 0.2 may be taken
        monkeypatch.setattr(autotune, "host_memory_bytes", lambda free=batches * of_a_batch: free)
        data = TrainData(streamed, CPU)
        assert len(data.loader.images) == 1 + depth
        assert ("; prefetch-batches 1: memory is short" in data.reason) == (depth == 1)
    monkeypatch.setattr(autotune, "host_memory_bytes", lambda: of_a_batch)
    with pytest.raises(UserError, match=r"need 0 MB of memory, 0 MB are free: lower the"):
        TrainData(streamed, CPU)


@needs_fork
@pytest.mark.parametrize(("size", "workers", "ahead"), [(20, 0, 4), (5, 1, 1), (150, 2, 4)])
def test_no_slot_is_written_while_it_is_in_use(streamed, size, workers, ahead):
    samples = Samples(open_dataset(streamed.data, "train"), streamed.data)
    samples.fill = lambda out, epoch, _: (out.fill_(epoch), {})[1]
    loader = SharedMemoryLoader(samples, size, workers, ahead, pin=False)
    sizes = [size] * 9 + [size // 2]
    for _ in range(2):  # passes
        places = ((number, torch.zeros(count).long()) for number, count in enumerate(sizes))
        for number, (images, _, indices) in enumerate(loader.begin(places)):
            time.sleep(0.002)
            assert (images == number).all()
            assert len(images) == len(indices) == sizes[number]
        assert number == 9
    loader.close()


KILLED = r"ended by SIGKILL \(out of memory\? fewer .* to resume$"


@pytest.mark.parametrize(
    ("method", "number", "words"),
    [
        *((method, signal.SIGKILL, KILLED) for method in ("fork", "forkserver", "spawn")),
        ("fork", signal.SIGBUS, r"by SIGBUS \(a memory-mapped file was cut short.* to resume$"),
        ("fork", signal.SIGSTOP, r"^no image for 1 s: a data worker hangs"),
    ],
)
def test_the_end_of_workers_is_told_with_a_hint(streamed, method, number, words, monkeypatch):
    monkeypatch.setattr(platform, "START_METHOD", method)
    monkeypatch.setattr(shared_memory, "POLL_SECONDS", 0.2)
    events, make = [], BaseContext.Event
    monkeypatch.setattr(BaseContext, "Event", lambda ctx: events.append(make(ctx)) or events[-1])
    patience = 1 if number == signal.SIGSTOP else 60
    count = 1 if method == "spawn" else 2  # each of which imports torch
    data = TrainData(changed(streamed, data__workers=count, run__timeout_seconds=patience), CPU)
    batches = data.batches(0, 100)
    next(batches)
    events[0]._cond.acquire()  # as one that dies with a lock of the loader
    workers = [worker.pid for worker in data.loader.workers]
    for pid in workers:
        os.kill(pid, number)
    with pytest.raises(FaultError, match=words) as error:
        list(batches)
    assert "\n" not in str(error.value)
    wait_for(lambda: not any(map(is_alive, workers)))


def test_a_worker_gets_a_part_of_a_batch_at_least(streamed, monkeypatch):
    monkeypatch.setattr(worker_count, "num_cores", lambda: 8)
    data = TrainData(changed(streamed, data__workers="auto"), CPU)
    assert "1 worker: the most that" in data.reason  # of 12 images, 8 are a part
    assert data.data.workers == data.workers  # evaluation measures nothing
    monkeypatch.setattr(worker_count, "PART_SIZES", (1, 64))
    auto = changed(streamed, data__workers="auto").data
    assert worker_count.choose_workers(auto, data.loader.samples, CPU)[0] == 4


def test_a_worker_that_is_killed_while_others_start_is_named(streamed, monkeypatch):
    workers, reset = [], _MultiProcessingDataLoaderIter._reset

    def killing(self, *arguments, **named):
        if not workers:
            workers.append(self._workers[0].pid)
            os.kill(workers[0], signal.SIGKILL)
            os.waitid(os.P_PID, workers[0], os.WEXITED | os.WNOWAIT)
        reset(self, *arguments, **named)

    monkeypatch.setattr(_MultiProcessingDataLoaderIter, "_reset", killing)
    data = TrainData(changed(streamed, data__workers=2), CPU)
    with pytest.raises(FaultError, match=KILLED) as error:
        list(data.batches(0, 100))
    assert f"(process {workers[0]})" in str(error.value)


# Of DataLoader, whose iterator is half made.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "error",
    [
        OSError(24, "Too many open files"),
        RuntimeError("can't start new thread"),
        KeyboardInterrupt("by the user"),
    ],
)
def test_workers_that_have_started_end_if_another_cannot(streamed, monkeypatch, error):
    before, started, begin = active_children(), [], BaseProcess.start

    def start_one(process):
        if started:
            raise error
        begin(process)
        started.append(process)

    monkeypatch.setattr(BaseProcess, "start", start_one)
    data = TrainData(changed(streamed, data__workers=2), CPU)
    told = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else FaultError
    with pytest.raises(told, match=re.escape(str(error))):
        list(data.batches(0, 100))
    assert (started[0].exitcode, active_children()) == (-signal.SIGKILL, before)


@pytest.mark.parametrize("refused", [False, True])
def test_memory_that_can_not_be_locked_is_noticed(config, monkeypatch, refused):
    cuda, forget = Mock(), Mock()
    cuda.cudaHostRegister.return_value = int(refused)
    cuda.cudaGetErrorString.return_value = "invalid argument"
    monkeypatch.setattr(shared_memory, "refusals", [])
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(shared_memory, "forget_cuda_error", forget)
    samples = Samples(open_dataset(config.data, "train"), config.data)
    batches = SharedMemoryLoader(samples, 4, workers=0, prefetch_batches=1, pin=True)
    batches.start()
    batches.close()
    slots = batches.images, batches.labels, batches.indices
    memory = [(tensor.data_ptr(), tensor.nbytes, 0) for tensor in slots]
    released = [] if refused else [call.cudaHostUnregister(place) for place, *_ in memory]
    asked = [one for one in cuda.mock_calls if one != call.cudaGetErrorString(int(refused))]
    assert asked == [call.cudaHostRegister(*place) for place in memory] + released
    assert forget.call_count == 3 * refused
    why = "cudaHostRegister: error 1, invalid argument"
    assert shared_memory.refusals == [why] * 3 * refused


def test_an_error_on_the_gpu_leaves_no_worker_and_stays_the_one_that_is_told(config, monkeypatch):
    def fail():
        alive.extend(worker.is_alive() for worker in workers)
        raise RuntimeError("CUDA error: device-side assert triggered")

    cuda, alive = Mock(), []
    cuda.cudaHostRegister.return_value = 0
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    samples = Samples(open_dataset(config.data, "train"), config.data)
    batches = SharedMemoryLoader(samples, 4, workers=2, prefetch_batches=1, pin=True)
    next(batches.begin([(0, torch.arange(4))]))
    workers = batches.workers
    with pytest.raises(ValueError, match="the first"), closing(batches):
        raise ValueError("the first")
    assert alive == [False, False]
    assert cuda.cudaHostUnregister.call_count == 3


@pytest.fixture
def mocked_streams(monkeypatch):
    for name in ("Stream", "Event", "current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    copy_stream.cache_clear()
    yield
    copy_stream.cache_clear()


@pytest.mark.usefixtures("mocked_streams")
def test_a_pass_frees_memory_that_the_next_pass_takes_as_both_copy_in_one_stream():
    for _ in range(3):
        assert len([*prefetched(iter([(Mock(), Mock())]), World(torch.device("cuda")))]) == 1
    assert torch.cuda.Stream.call_count == 1


@pytest.mark.usefixtures("mocked_streams")
@pytest.mark.parametrize("is_pinned", [False, True])
def test_batches_that_a_gpu_can_not_fetch_by_itself_are_said_once(monkeypatch, capsys, is_pinned):
    monkeypatch.setattr(batch, "refusals", ["cudaHostRegister: error 2, out of memory"])
    batches = [(Mock(is_pinned=lambda: is_pinned), Mock()) for _ in range(3)]
    for _ in range(2):
        copies = prefetched(iter(batches), World(torch.device("cuda")))
        assert [copy.pixels for copy in copies] == [images.to() for images, _ in batches]
    printed = capsys.readouterr().out
    why = "cudaHostRegister: error 2, out of memory"
    assert printed.count(f"batches are not page-locked ({why})") == (not is_pinned)


@needs_fork
def test_an_unreadable_image_is_left_out_wherever_it_is_in_a_batch(streamed):
    samples, noted = Samples(open_dataset(streamed.data, "train"), streamed.data), []
    samples.fill = lambda *_: {1: "damaged"}  # the second of each part, of which each has 8 images
    note = lambda index, _: noted.append(index)  # noqa: E731
    with contextlib.closing(SharedMemoryLoader(samples, 12, 1, 1, pin=False, note=note)) as batches:
        _, labels, _ = next(batches.begin([(0, torch.arange(12))]))
        assert (labels == LEFT_OUT).nonzero()[:, 0].tolist() == noted == [1, 9]


def test_the_time_that_decoding_takes_adds_up(streamed):
    samples = Samples(open_dataset(streamed.data, "train"), streamed.data)
    samples.fill = lambda *_: (time.sleep(0.01), {})[1]
    batches = SharedMemoryLoader(samples, 4, 0, 1, pin=False)
    list(batches.begin([(0, torch.arange(4))] * 3))
    assert (batches.num_filled, batches.busy_seconds >= 0.03) == (12, True)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=needs_fork)])
def test_what_ends_a_run_in_a_worker_is_told_as_it_is(streamed, workers):
    samples = Samples(open_dataset(streamed.data, "train"), streamed.data)
    samples.fill = Mock(side_effect=FaultError("no more images can be read: planted"))
    loader = SharedMemoryLoader(samples, 4, workers, 1, pin=False)
    with contextlib.closing(loader) as batches, pytest.raises(FaultError, match=r"planted$"):
        list(batches.begin([(0, torch.arange(4))] * 3))


def test_workers_go_on_when_a_signal_reaches_the_whole_group(streamed):
    with contextlib.closing(TrainData(streamed, CPU)) as data:
        batches = data.batches(0, 12)
        next(batches)
        for number in platform.STOP_SIGNALS:
            os.kill(data.loader.workers[0].pid, number)
        assert len(list(batches)) == 11
