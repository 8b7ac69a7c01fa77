"""What only a GPU can show: every precision, no hidden waits, correct overlap, exactness."""

import gc

import pytest
import torch
from conftest import changed
from test_faults import last, plant
from test_resume import assert_same, train_until

from image_classifier.data.loader import Prefetcher, TrainData
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


@pytest.mark.parametrize("where", ["device", "host", "stream"])
@pytest.mark.parametrize("name", ["sgd", "adamw", "muon"])
def test_no_step_waits_for_the_device(on_gpu, monkeypatch, where, name):
    batches = TrainData.batches

    def watched(data, start, stop):
        for step, batch in enumerate(batches(data, start, stop), start=1):
            # The first step tunes and allocates, the last one logs and evaluates.
            torch.cuda.set_sync_debug_mode("error" if 1 < step < stop else "default")
            yield batch
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(TrainData, "batches", watched)
    quiet = changed(on_gpu, run__log_every_steps=100, run__evaluate_every_epochs=100.0)
    train(changed(quiet, precision="bf16", data__where=where, optim__name=name, data__workers=2))


def test_copies_that_overlap_bring_the_right_images():
    device = torch.device("cuda", 0)
    host = [torch.full((64, 64, 64, 3), step, dtype=torch.uint8) for step in range(100)]
    pairs = ((images.pin_memory(), torch.tensor([0])) for images in host)
    busy = torch.randn(2000, 2000, device=device)
    sums = []
    for batch in Prefetcher(pairs, World(device)):
        for _ in range(5):
            busy = busy @ busy / 2000  # the device falls behind the host
        sums.append(batch.images.float().mean())
    assert torch.stack(sums).tolist() == list(range(100))


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


def test_photographs_train_on_the_device(on_gpu, photos):
    config = changed(on_gpu, data__name="folder", data__root=str(photos), data__batch_size=4)
    train(changed(config, augment__crop="resized", augment__policy="randaugment"))


def test_a_gpu_with_too_little_memory_trains_in_smaller_micro_batches(on_gpu):
    config = changed(on_gpu, model__width=128, data__limit=128, data__batch_size=128)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    unbroken = train(config)
    needed = torch.cuda.max_memory_reserved() - torch.cuda.memory_reserved() // 2
    total = torch.cuda.get_device_properties(0).total_memory
    capped = changed(config, run__dir=f"{config.run.dir}-capped")
    scores, codes = [], [OutOfMemoryError.code]
    try:
        while codes[-1] == OutOfMemoryError.code:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(0.6 * needed / total)
            codes.append(attempt(lambda: scores.append(train(capped))))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert codes[1:-1]  # it did run out of memory
    assert codes[-1] == 0
    assert abs(scores[0].loss - unbroken.loss) < 0.2
