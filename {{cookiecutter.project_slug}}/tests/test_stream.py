"""Workers: what they decode is right, they are few enough, and their end is never a riddle."""

import gc
import io
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from conftest import changed, is_alive, run_alone, write_photo
from PIL import Image, ImageOps

from image_classifier.config import Config, FaultError, UserError
from image_classifier.data import placement, workers
from image_classifier.data import stream as stream_module
from image_classifier.data.datasets import open_dataset
from image_classifier.data.datasets.paths import PathList
from image_classifier.data.datasets.source import Source
from image_classifier.data.decode import (
    decode,
    decode_jpeg,
    read_image,
)
from image_classifier.data.loader import EvalData, TrainData
from image_classifier.data.samples import Samples
from image_classifier.data.stream import Stream, ring_bytes
from image_classifier.runtime.distributed import World

CPU = World(torch.device("cpu"))


def by_pillow(encoded: bytes) -> np.ndarray | None:
    """What Pillow makes of a JPEG; None if it refuses it."""
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    except (OSError, SyntaxError, ValueError):
        return None


def as_jpeg(orientation: int = 1, **options: object) -> bytes:
    """A small photograph in a file."""
    gradient = np.arange(40 * 56 * 3, dtype=np.uint32).reshape(40, 56, 3) * 37 % 251
    image = Image.fromarray(gradient.astype(np.uint8)).resize((33, 50))
    exif = Image.Exif()
    exif[0x0112] = orientation
    target = io.BytesIO()
    image.save(target, "JPEG", exif=exif, **options)
    return target.getvalue()


@pytest.fixture
def streamed(config: Config, photos: Path) -> Config:
    """Photographs that one worker decodes, four to a batch."""
    return changed(
        config,
        data__name="folder",
        data__root=str(photos),
        data__where="stream",
        data__workers=1,
        data__batch_size=4,
        augment__crop="resized",
    )


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_jpeg_has_the_pixels_that_pillow_sees(orientation: int) -> None:
    encoded = as_jpeg(orientation, quality=80, progressive=orientation % 2 == 0)
    fast = decode_jpeg(encoded)
    assert fast is not None
    assert np.array_equal(fast, by_pillow(encoded))


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, of damage that it passes over
def test_a_damaged_jpeg_is_taken_or_refused_as_pillow_does() -> None:
    chance = random.Random(0)
    refused = 0
    for number in range(200):
        encoded = bytearray(as_jpeg(quality=80, progressive=number % 3 == 0))
        for _ in range(chance.choice((1, 3, 10))):
            encoded[chance.randrange(len(encoded))] = chance.randrange(256)
        if number % 5 == 0:
            del encoded[chance.randrange(len(encoded)) :]
        expected = by_pillow(bytes(encoded))
        if expected is None:
            refused += 1
            with pytest.raises(Exception):  # noqa: B017, PT011 - Pillow has many kinds
                decode(bytes(encoded))
        else:
            assert np.array_equal(decode(bytes(encoded)).numpy(), expected)
    assert 40 < refused < 160


def test_a_reduced_jpeg_keeps_what_is_needed(tmp_path: Path) -> None:
    write_photo(tmp_path / "large.jpg", 0, size=(640, 480))
    whole = read_image(tmp_path / "large.jpg")
    sizes = {keep: read_image(tmp_path / "large.jpg", keep).shape[0] for keep in (480, 240, 100)}
    assert sizes == {480: 480, 240: 240, 100: 120}
    small = read_image(tmp_path / "large.jpg", 100).float()
    means = whole.float().view(120, 4, 160, 4, 3).mean(dim=(1, 3))
    assert (small - means).abs().mean() < 1


def test_reduced_images_are_the_same_wherever_they_are_kept(
    streamed: Config,
) -> None:
    reduced = changed(streamed, data__image_size=8, data__decode="reduced")
    decoded, kept, exact = (
        torch.cat([batch.images.clone() for batch in EvalData(data, "val", CPU).batches()])
        for data in (
            reduced.data,
            replace(reduced.data, where="auto"),
            replace(reduced.data, where="auto", decode="exact"),
        )
    )
    assert torch.equal(decoded, kept)
    assert not torch.equal(kept, exact)


def test_threads_make_what_processes_make(
    streamed: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_processes = [batch.images.clone() for batch in TrainData(streamed, CPU).batches(0, 6)]
    monkeypatch.setattr(stream_module, "FORKS", False)
    by_threads = [batch.images.clone() for batch in TrainData(streamed, CPU).batches(0, 6)]
    assert torch.equal(torch.stack(by_processes), torch.stack(by_threads))


def test_a_pass_that_is_given_up_leaves_the_next_one_right(streamed: Config) -> None:
    data = TrainData(streamed, CPU)
    first = next(data.batches(0, 6)).images.clone()
    next(data.batches(2, 6))
    assert torch.equal(next(data.batches(0, 6)).images, first)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_image_is_named(streamed: Config, tmp_path: Path, workers: int) -> None:
    for number in range(8):
        write_photo(tmp_path / "train" / "ant" / f"{number}.jpg", number)
    (tmp_path / "train" / "ant" / "3.jpg").write_bytes(b"\xff\xd8\xff\xe0 no JPEG")
    streamed = changed(streamed, data__root=str(tmp_path), data__workers=workers)
    streamed = changed(streamed, data__val_fraction=0.001)
    with pytest.raises(UserError, match=r"cannot read image .*3\.jpg"):
        list(TrainData(streamed, CPU).batches(0, 2))


def test_a_worker_that_was_killed_is_told(streamed: Config) -> None:
    data = TrainData(streamed, CPU)
    batches = data.batches(0, 100)
    next(batches)
    os.kill(data.stream.pids[0], signal.SIGKILL)
    with pytest.raises(FaultError, match=r"data worker .* ended by SIGKILL \(out of memory\?"):
        list(batches)


def killed_with_workers(config: Config, path: Path) -> None:
    """Begin to stream, write the workers' numbers to a file, and be killed while they work."""
    os.dup2(os.open(path.with_name("said"), os.O_CREAT | os.O_WRONLY), 2)
    data = TrainData(changed(config, data__workers=2), CPU)
    data.stream.samples.fill = lambda *_: time.sleep(0.1) or {}
    next(data.batches(0, 100))
    path.write_text(json.dumps(data.stream.pids))
    os.kill(os.getpid(), signal.SIGKILL)


def test_workers_end_in_silence_with_the_process_that_they_serve(
    streamed: Config, tmp_path: Path
) -> None:
    code, _ = run_alone(killed_with_workers, streamed, tmp_path / "pids")
    assert code == -signal.SIGKILL
    end = time.monotonic() + 5
    pids = json.loads((tmp_path / "pids").read_text())
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert (tmp_path / "said").read_text() == ""


def private_bytes(pid: int) -> int:
    """The memory that no other process shares with this one."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    private = [line.split() for line in lines if line.startswith("Private_")]
    return 1024 * sum(int(kilobytes) for _, kilobytes, _ in private)


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux")
def test_workers_have_no_copy_of_the_names_of_all_files(streamed: Config) -> None:
    count = 200_000
    picked = torch.arange(0, count, 16)  # some of each page, whatever it holds
    began = time.process_time()
    names = (b"n%07d/n%07d_%08d.JPEG" % (i % 1000, i % 1000, i) for i in range(count))
    paths = PathList(Path("/photos"), names)
    assert time.process_time() - began < 1
    source = Source(torch.zeros(count, dtype=torch.int64), ("ant",), paths=paths)

    def look_up(_: torch.Tensor, epoch: int, asked: np.ndarray) -> dict[int, int]:
        for index in (asked * epoch).tolist():
            assert source.paths[index].name
        return {}

    samples = Samples(source, streamed.data)
    samples.fill = look_up
    stream = Stream(samples, len(picked), 1, 1, pin=False)
    found = []
    for _ in stream.batches((epoch, picked) for epoch in (0, 1)):
        found.append(private_bytes(stream.pids[0]))
    stream.close()
    assert found[1] - found[0] < 4 * 2**20  # a list of them would be three times as much


def test_an_index_of_files_has_no_object_for_each_of_them(streamed: Config) -> None:
    held = []
    for split in ("train", "val"):  # of 12 and of 4 files
        ahead, found = [open_dataset(streamed.data, split)], {}
        while ahead:
            one = ahead.pop()
            if id(one) not in found and not isinstance(one, type | ModuleType):
                found[id(one)] = one
                ahead += gc.get_referents(one)
        held.append(len(found))
    assert held[0] == held[1]


def test_the_number_of_workers_is_measured_once(
    streamed: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured = []

    def rate(_: Samples, count: int) -> float:
        measured.append(count)
        return {1: 100, 2: 190, 4: 300, 8: 310}[count]

    monkeypatch.setattr(workers, "WORTH_SECONDS", 0)
    monkeypatch.setattr(workers, "rate", rate)
    monkeypatch.setattr(workers, "num_cores", lambda: 8)
    monkeypatch.setattr(workers, "device_name", lambda _: "a GPU")
    data = replace(streamed.data, workers="auto", cache=str(tmp_path / "cache"))
    samples = Samples(open_dataset(data, "train"), data)
    world = replace(CPU, device=torch.device("cuda"))
    count, why = workers.choose_workers(data, samples, world)
    assert count == 4
    assert "4 (4 x GPUs): 300" in why
    assert measured == [1, 2, 4, 8]
    assert workers.choose_workers(data, samples, world) == (count, why)
    assert measured == [1, 2, 4, 8]


def test_few_images_are_not_worth_a_measurement(streamed: Config) -> None:
    streamed = changed(streamed, data__workers="auto")
    assert "not worth measuring" in TrainData(streamed, CPU).reason


def test_a_rate_is_measured_with_real_workers(streamed: Config) -> None:
    samples = Samples(open_dataset(streamed.data, "train"), streamed.data)
    assert workers.rate(samples, 1) > 10


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_nothing_lies_in_the_shared_memory_that_docker_is_sparing_of(streamed: Config) -> None:
    data = TrainData(changed(streamed, data__workers=2), CPU)
    batches = data.batches(0, 6)
    next(batches)
    for pid in (os.getpid(), *data.stream.pids):
        maps = Path(f"/proc/{pid}/maps").read_text()
        assert "/dev/zero (deleted)" in maps
        assert "/dev/shm/" not in maps
    data.close()


def test_a_ring_of_one_batch_is_enough(streamed: Config) -> None:
    samples = Samples(open_dataset(streamed.data, "train"), streamed.data)
    indices = torch.arange(12)
    files = sorted(os.listdir("/dev/fd"))
    stream = Stream(samples, 5, workers=2, prefetch_batches=1, pin=False)
    places = ((0, part) for part in indices.split(5))
    seen = [numbers.tolist() for _, _, numbers in stream.batches(places)]
    stream.close()
    assert seen == [part.tolist() for part in indices.split(5)]
    assert sorted(os.listdir("/dev/fd")) == files  # it leaves none open


def ended(streamed: Config, end: Callable[[Stream], object], **knobs: object) -> str:
    """What is said within seconds after `end` was done to the workers of a stream."""
    data = TrainData(changed(streamed, data__workers=2, **knobs), CPU)
    batches = data.batches(0, 100)
    next(batches)
    began = time.monotonic()
    end(data.stream)
    with pytest.raises(FaultError) as error:
        list(batches)
    assert time.monotonic() - began < 5
    data.stream.close()
    return str(error.value)


def send_all(number: signal.Signals) -> Callable[[Stream], object]:
    """Send a signal to every worker."""
    return lambda stream: [os.kill(pid, number) for pid in stream.pids]


def test_the_end_of_all_workers_is_told_at_once(streamed: Config) -> None:
    said = ended(streamed, send_all(signal.SIGKILL))
    assert "ended by SIGKILL (out of memory? fewer --data.workers" in said
    assert said.endswith("the same command goes on from the last save")


def test_a_file_cut_short_under_a_memory_map_is_told(
    streamed: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As the system tells it; a real one would leave pytest's account of it among its results.
    monkeypatch.setattr(os, "waitstatus_to_exitcode", lambda _: -signal.SIGBUS)
    said = ended(streamed, send_all(signal.SIGKILL))
    assert "ended by SIGBUS (a file that it read through a memory map" in said


def test_workers_that_hang_are_given_up_and_ended(streamed: Config) -> None:
    pids = []

    def stop(stream: Stream) -> None:
        assert stream.timeout_seconds == 7
        stream.timeout_seconds = 0.2
        pids.extend(stream.pids)
        send_all(signal.SIGSTOP)(stream)

    said = ended(streamed, stop, run__timeout_seconds=7)
    assert said.startswith("no image for 0.2 s: a data worker hangs")
    end = time.monotonic() + 5
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < end


def test_a_thread_that_hangs_is_given_up(streamed: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "FORKS", False)
    gate = threading.Event()
    samples = Samples(open_dataset(streamed.data, "train"), streamed.data)
    samples.fill = lambda *_: gate.wait() and {}
    stream = Stream(samples, 4, 1, 1, pin=False, timeout_seconds=0.1)
    with pytest.raises(FaultError, match=r"no image for 0\.1 s"):
        list(stream.batches([(0, torch.arange(4))]))
    gate.set()


def test_workers_that_ended_between_two_batches_are_told(streamed: Config) -> None:
    stream = TrainData(changed(streamed, data__workers=2), CPU).stream
    assert len(list(stream.batches([(0, torch.arange(4))]))) == 1
    pids = list(stream.pids)
    send_all(signal.SIGKILL)(stream)
    while any(is_alive(pid) for pid in pids):
        time.sleep(0.001)
    with pytest.raises(FaultError, match="ended by SIGKILL"):  # and no BrokenPipeError
        list(stream.batches([(0, torch.arange(4))]))


def test_how_a_worker_ended_is_asked_until_the_system_knows(
    streamed: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = TrainData(streamed, CPU).stream
    stream.pids = [2**22 + 1]  # which no process has
    asked = iter([(0, 0)] * 3 + [(stream.pids[0], signal.SIGKILL)])
    monkeypatch.setattr(os, "waitpid", lambda *_: next(asked))
    monkeypatch.setattr(stream_module.time, "sleep", lambda _: None)
    assert "was ended by SIGKILL" in str(stream.end_of_a_worker(stream_module.GONE_SECONDS))


def test_more_tasks_than_pipes_hold_are_done(
    streamed: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "PART_SIZES", (1, 1))
    samples = Samples(open_dataset(streamed.data, "train"), streamed.data)
    samples.fill = lambda *_: {}
    indices = torch.arange(12).repeat(500)
    stream = Stream(samples, 3000, 2, 1, pin=False)  # 65,536 bytes hold 2,048 tasks
    seen = torch.cat([numbers.clone() for *_, numbers in stream.batches([(0, indices[:3000])] * 2)])
    stream.close()
    assert len(seen) == 6000


def test_a_ring_takes_the_memory_that_there_is(
    streamed: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_a_batch = ring_bytes(4, 32, 1)
    for batches, depth in ((1000, 4), (10, 1)):  # free, in batches; of which 0.4 may be taken
        monkeypatch.setattr(placement, "host_memory_bytes", lambda free=batches * of_a_batch: free)
        data = TrainData(streamed, CPU)
        assert len(data.stream.images) == 1 + depth
        assert ("; 1 batch ahead: " in data.reason) == (depth == 1)
    monkeypatch.setattr(placement, "host_memory_bytes", lambda: 3 * of_a_batch)
    with pytest.raises(UserError, match=r"need 0 MB of memory, 0 MB are free: lower --data\.batch"):
        TrainData(streamed, CPU)
