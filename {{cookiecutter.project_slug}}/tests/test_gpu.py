"""What only a GPU can show: every precision, no hidden waits, correct overlap, exactness."""

import gc
from contextlib import closing

import pytest
import torch
from conftest import changed, on_deep, train_until
from test_faults import last, plant
from test_resume import assert_same

from image_classifier.data.loader import TrainData
from image_classifier.errors import FaultError
from image_classifier.runtime.distributed import World
from image_classifier.runtime.launch import attempt
from image_classifier.runtime.out_of_memory import (
    OutOfMemoryError,
)
from image_classifier.train import train

is_there = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not is_there, reason="needs a CUDA device")]


@pytest.fixture
def on_gpu(config):
    """A short run with all that may happen in a step."""
    config = changed(config, augment__cutout=4, augment__mixup=0.2, augment__cutmix=0.5)
    config = changed(config, optim__ema_decay=0.9, optim__clip_norm=1.0, model__dropout=0.1)
    return changed(config, compute__device="cuda", model__name="resnet9")


def trained_weights(config, **knobs):
    """The weights that a run with other values of some options ends with."""
    train(changed(config, **knobs))
    return last(changed(config, **knobs))["model"]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["resnet9", "airbench"])
def test_a_run_ends_well_in_every_precision(on_gpu, name, precision, compiled):
    config = changed(on_gpu, model__name=name, model__width=8, precision=precision)
    weights = trained_weights(config, compute__compile=compiled)
    assert all(tensor.isfinite().all() for tensor in weights.values())


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("where", ["device", "host", "stream"])
@pytest.mark.parametrize("name", ["sgd", "adamw", "muon"])
def test_no_step_waits_for_the_device(on_gpu, monkeypatch, where, name):
    batches = TrainData.batches

    def watched(data, start, stop):
        for step, batch in enumerate(batches(data, start, stop), start=1):
            # The first step tunes and allocates, the last one of the epoch logs and evaluates.
            torch.cuda.set_sync_debug_mode("error" if 1 < step < stop else "default")
            yield batch
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(TrainData, "batches", watched)
    quiet = changed(on_gpu, run__log_every_steps=100, run__evaluate_every_epochs=100.0, epochs=1)
    train(changed(quiet, precision="bf16", data__where=where, optim__name=name, data__workers=2))


@pytest.mark.parametrize("workers", [1, 4, 16])
def test_streamed_batches_arrive_to_the_last_byte_while_device_and_bus_are_busy(on_photos, workers):
    config = changed(on_photos, data__image_size=128, data__batch_size=12, augment__crop="resized")

    def digests(device, workers, work=lambda: None):
        data = TrainData(changed(config, data__workers=workers), World(device))
        factors = torch.arange(1, 3 * 12 * 128**2 + 1, device=device).view(12, 3, 128, 128)
        found = []
        with closing(data):
            for batch in data.batches(0, 1000):
                work()  # the device falls behind the host, and reads what may be overwritten
                numbers = (batch.images * factors).sum(), batch.labels.sum(), batch.indices.sum()
                found.append(torch.stack(numbers))
        return torch.stack(found).tolist()

    gpu, bus = torch.device("cuda", 0), torch.cuda.Stream()
    busy, load = torch.randn(2000, 2000, device=gpu), torch.empty(2**24).pin_memory()

    def work():
        torch.mm(busy, busy)
        with torch.cuda.stream(bus):
            load.to(gpu, non_blocking=True)

    assert digests(gpu, workers, work) == digests(torch.device("cpu"), workers=2)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_deterministic_run_repeats_and_resumes_to_the_last_bit_wherever_its_images_are(
    on_gpu, tmp_path, precision
):
    exact = changed(on_gpu, deterministic=True, precision=precision, data__workers=2)
    exact = changed(exact, run__evaluate_every_epochs=0.25)  # and saves each step
    train_until(exact, 3, kill=False)
    resumed = trained_weights(exact)
    for where in ("device", "host", "stream"):
        other = trained_weights(exact, data__where=where, run__dir=str(tmp_path / where))
        assert_same(resumed, other)


def test_a_loss_that_is_not_finite_is_found_on_the_device(on_gpu, monkeypatch):
    plant(monkeypatch, lambda step, loss: loss * (float("nan") if step == 3 else 1))
    with pytest.raises(FaultError, match="the loss is not finite in steps"):
        train(on_gpu)


def test_fp16_skips_a_step_that_overflows_and_resumes_with_its_scale(on_gpu, monkeypatch, tmp_path):
    half = changed(on_gpu, precision="fp16", deterministic=True, run__evaluate_every_epochs=0.25)
    plant(monkeypatch, lambda step, loss: loss * (1e30 if step == 3 else 1))
    whole, broken = half, changed(half, run__dir=str(tmp_path / "broken"))
    train(whole)
    train_until(broken, 4, kill=False)
    monkeypatch.undo()
    train(broken)
    assert last(whole)["scaler"]["scale"] == 2**15  # once halved
    assert_same(last(whole), last(broken))


def test_photographs_train_on_the_device(on_gpu, photos):
    config = changed(on_gpu, data__name="folder", data__root=str(photos), data__batch_size=4)
    train(changed(config, augment__crop="resized", augment__policy="randaugment"))


def test_a_gpu_with_too_little_memory_trains_in_smaller_micro_batches(on_gpu):
    config = changed(on_gpu, model__width=128, data__limit=128, data__batch_size=128)
    config = changed(config, deterministic=True)  # or cuDNN takes memory to try its algorithms

    def peak(parts):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        run = changed(config, optim__accumulate=parts, run__dir=f"{config.run.dir}-{parts}")
        return train(run).value("loss"), torch.cuda.max_memory_reserved()

    (loss, whole), (_, less) = peak(1), peak(8)
    total = torch.cuda.get_device_properties(0).total_memory
    scores, codes = [], [OutOfMemoryError.code]
    try:
        while codes[-1] == OutOfMemoryError.code:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction((whole + less) / 2 / total)
            codes.append(attempt(lambda: scores.append(train(config))))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert codes[1:-1]  # it did run out of memory
    assert codes[-1] == 0
    assert abs(scores[0].loss - loss) < 0.2


@pytest.mark.parametrize("where", ["device", "host", "stream"])
def test_numbers_of_16_bits_arrive_as_on_a_cpu(config, satellite, where):
    config = on_deep(config, satellite, 5, data__where=where, data__workers=2, augment__crop="pad")

    def arrived(device):
        with closing(TrainData(config, World(device))) as data:
            return torch.cat([batch.images.float().cpu() for batch in data.batches(0, 3)])

    assert torch.equal(arrived(torch.device("cuda", 0)), arrived(torch.device("cpu")))
