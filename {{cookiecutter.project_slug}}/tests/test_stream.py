"""Workers: what they decode is right, they are few enough, and their end is never a riddle."""

import gc
import json
import multiprocessing
import os
import re
import signal
import time
from multiprocessing.context import BaseContext
from pathlib import Path

import pytest
import torch
from conftest import changed, is_alive, run_alone

from image_classifier.data import autotune, shared_memory
from image_classifier.data.datasets import open_dataset
from image_classifier.data.datasets.paths import PathList
from image_classifier.data.datasets.source import Source
from image_classifier.data.loader import TrainData
from image_classifier.data.samples import Samples
from image_classifier.data.shared_memory import SharedMemoryLoader
from image_classifier.errors import FaultError, UserError
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
    """Begin to stream, write the workers' numbers to a file, and be killed while they work."""
    os.dup2(os.open(path.with_name("said"), os.O_CREAT | os.O_WRONLY), 2)
    data = TrainData(changed(config, data__workers=2), CPU)
    data.loader.samples.fill = lambda *_: time.sleep(0.1) or {}
    next(data.batches(0, 100))
    path.write_text(json.dumps([worker.pid for worker in data.loader.workers]))
    os.kill(os.getpid(), signal.SIGKILL)


def test_workers_end_in_silence_with_the_process_that_they_serve(streamed, tmp_path):
    code, _ = run_alone(killed_with_workers, streamed, tmp_path / "pids")
    assert code == -signal.SIGKILL
    end = time.monotonic() + 20  # they look every 5 s
    pids = json.loads((tmp_path / "pids").read_text())
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert (tmp_path / "said").read_text() == ""


def private_bytes(pid):
    """The memory that no other process shares with this one."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    private = [line.split() for line in lines if line.startswith("Private_")]
    return 1024 * sum(int(kilobytes) for _, kilobytes, _ in private)


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux")
def test_workers_have_no_copy_of_the_names_of_all_files():
    count = 100_000
    picked = torch.arange(0, count, 16)  # some of each page, whatever it holds
    names = (b"n%07d/n%07d_%08d.JPEG" % (i % 1000, i % 1000, i) for i in range(count))
    paths = PathList(Path("/photos"), names)
    source = Source(torch.zeros(count, dtype=torch.int64), ("ant",), paths=paths)

    def look_up(_, epoch, asked):
        for index in (asked * epoch).tolist():
            assert source.paths[index].name
        return {}

    samples = Samples(source, 32)
    samples.fill = look_up
    loader = SharedMemoryLoader(samples, len(picked), 1, 1, pin=False)
    found = []
    for _ in loader.begin((epoch, picked) for epoch in (0, 1)):
        found.append(private_bytes(loader.workers[0].pid))
    loader.close()
    assert found[1] - found[0] < 4 * 2**20  # a list of them would be half as much again


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_nothing_lies_in_the_shared_memory_that_docker_is_sparing_of(streamed):
    data = TrainData(changed(streamed, data__workers=2), CPU)
    batches = data.batches(0, 6)
    next(batches)
    for pid in (os.getpid(), *(worker.pid for worker in data.loader.workers)):
        maps = Path(f"/proc/{pid}/maps").read_text()
        assert "/dev/zero (deleted)" in maps
        assert not re.search(r"/dev/shm/(?!sem\.)", maps)  # locks of a page each
    data.close()


def test_slots_take_the_memory_that_there_is(streamed, monkeypatch):
    of_a_batch = 4 * 3 * 32**2
    for batches, depth in ((1000, 4), (5, 1)):  # free, in batches; of which 0.4 may be taken
        monkeypatch.setattr(autotune, "host_memory_bytes", lambda free=batches * of_a_batch: free)
        data = TrainData(streamed, CPU)
        assert len(data.loader.images) == 1 + depth
        assert ("; prefetch-batches 1: memory is short" in data.reason) == (depth == 1)
    monkeypatch.setattr(autotune, "host_memory_bytes", lambda: of_a_batch)
    with pytest.raises(UserError, match=r"need 0 MB of memory, 0 MB are free: lower the"):
        TrainData(streamed, CPU)


def num_open_files():
    """Files that this process has open, when what nobody holds any more is gone."""
    gc.collect()
    multiprocessing.active_children()
    return len(os.listdir("/dev/fd"))


@pytest.mark.parametrize(
    ("workers", "batch_size", "prefetch"), [(0, 20, 4), (1, 5, 1), (2, 150, 4)]
)
def test_no_slot_is_written_while_it_is_in_use(streamed, workers, batch_size, prefetch):
    samples = Samples(open_dataset(streamed.data, "train"), 32)

    def write(out, epoch, _):
        out.fill_(epoch)
        return {}

    samples.fill = write
    files = []
    for _ in range(2):  # loaders: the first use of workers opens files that stay
        loader = SharedMemoryLoader(samples, batch_size, workers, prefetch, pin=False)
        for _ in range(2):  # passes, of which the last batch is smaller
            places = [(number, torch.zeros(batch_size, dtype=torch.int64)) for number in range(9)]
            places += [(9, torch.zeros(batch_size // 2, dtype=torch.int64))]
            for number, (images, _, indices) in enumerate(loader.begin(places)):
                time.sleep(0.002)
                assert (images == number).all()
                assert len(images) == len(indices) == len(places[number][1])
            assert number == 9
        loader.close()
        del loader
        end = time.monotonic() + 5
        while files and num_open_files() > files[0] and time.monotonic() < end:
            time.sleep(0.01)  # queues close theirs in threads of their own
        files.append(num_open_files())
    assert files[-1] <= files[0]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGKILL, r"ended by SIGKILL \(out of memory\? fewer .* to resume$"),
        (signal.SIGBUS, r"ended by SIGBUS \(a memory-mapped file was cut short.* to resume$"),
        (signal.SIGSTOP, r"^no image for 1 s: a data worker hangs"),
    ],
)
def test_the_end_of_workers_is_told_with_a_hint(streamed, number, words, monkeypatch):
    monkeypatch.setattr(shared_memory, "POLL_SECONDS", 0.2)
    data = TrainData(changed(streamed, data__workers=2, run__timeout_seconds=1), CPU)
    handler = signal.getsignal(signal.SIGCHLD)
    batches = data.batches(0, 100)
    next(batches)
    assert signal.getsignal(signal.SIGCHLD) == handler
    workers = list(data.loader.workers)
    assert len(workers) == 2
    for worker in workers:
        os.kill(worker.pid, number)
    with pytest.raises(FaultError, match=words) as error:
        list(batches)
    assert "\n" not in str(error.value)
    for worker in workers:
        worker.join(5)
        assert not worker.is_alive()


def test_a_worker_that_dies_with_a_lock_of_the_loader_stops_nobody(streamed, monkeypatch):
    events, make = [], BaseContext.Event
    monkeypatch.setattr(BaseContext, "Event", lambda ctx: events.append(make(ctx)) or events[-1])
    data = TrainData(streamed, CPU)
    batches = data.batches(0, 100)
    next(batches)
    events[0]._cond.acquire()
    os.kill(data.loader.workers[0].pid, signal.SIGKILL)
    with pytest.raises(FaultError, match="ended by SIGKILL"):
        list(batches)


def test_the_number_of_workers_is_measured_if_that_is_worth_it(streamed, monkeypatch):
    auto = changed(streamed, data__workers="auto")
    monkeypatch.setattr(autotune, "num_cores", lambda: 8)
    data = TrainData(auto, CPU)
    assert "1 worker: the most that" in data.reason  # of 12 images, 8 are a part
    assert data.data.workers == data.workers  # evaluation measures nothing
    monkeypatch.setattr(autotune, "PROBED_TOGETHER", 5)  # of 12: batches of equal size
    monkeypatch.setattr(shared_memory, "PART_SIZES", (1, 64))
    monkeypatch.setattr(autotune, "PART_SIZES", (1, 64))
    assert autotune.rate(data.loader.samples, 3) > 10
    why = autotune.choose_workers(auto.data, data.loader.samples, CPU)[1]
    assert why.startswith("decoding takes only")
    rates = {1: 100, 2: 190, 4: 300, 8: 310}
    monkeypatch.setattr(autotune, "WORTH_SECONDS", 0)
    monkeypatch.setattr(autotune, "rate", lambda _, count: rates[count])
    for device in ("cuda", "cpu"):  # the model needs half of the cores of a CPU
        world = World(torch.device(device))
        count, why = autotune.choose_workers(auto.data, data.loader.samples, world)
        assert count == 4
        assert ("8: 310" in why) == (device == "cuda")
