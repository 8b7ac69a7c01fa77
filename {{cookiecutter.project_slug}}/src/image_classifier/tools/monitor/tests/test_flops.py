"""FLOPs are those by hand, and MFU is relative to the peak of the very device."""

import re
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import changed, logged
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

from image_classifier.tools.monitor import flops
from image_classifier.tracking import Speed
from image_classifier.train import train


def test_flops_are_those_by_hand_and_counting_changes_nothing():
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten()
    model = nn.Sequential(*layers, nn.Linear(4 * 64, 10))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    assert flops.count_flops(model, 8) == 2 * (64 * 3 * 9 * 4 + 256 * 10)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.training


def test_attention_is_counted_although_frozen_weights_have_a_kernel_of_their_own():
    layer = nn.TransformerEncoderLayer(12, 2, 24, batch_first=True)
    model = nn.Sequential(nn.Flatten(), nn.Unflatten(1, (16, 12)), layer)
    trained = flops.count_flops(model, 8)
    assert trained > 2 * 16 * 12 * (4 * 12 + 2 * 24)
    assert flops.count_flops(model.requires_grad_(False), 8) == trained


def test_a_network_that_gives_a_weight_to_a_layer_is_counted():
    class Token(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3 * 64))
            self.head = nn.Linear(3 * 64, 5)

        def forward(self, images):
            return self.head(self.weight) + self.head(images.flatten(1))

    model = Token()
    assert flops.count_flops(model, 8) == 2 * 2 * 3 * 64 * 5
    assert all(weight.requires_grad for weight in model.parameters())


def test_a_weight_that_is_computed_once_for_a_batch_is_no_cost_of_an_image():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Linear(5, 5)

        def forward(self, weight):
            return self.scale.weight @ weight

    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 5))
    register_parametrization(model[1], "weight", Scaled())  # as LoRA does
    assert flops.count_flops(model, 8) == 2 * 3 * 64 * 5
    assert all(weight.requires_grad for weight in model.parameters())


def test_small_images_cost_less(config, monkeypatch):
    monkeypatch.setattr(flops, "count_flops", lambda *_: 100)
    monkeypatch.setattr(flops, "find_peak", lambda _: (1000, "datasheet"))
    setup = SimpleNamespace(config=config, world=SimpleNamespace(size=2), model=None)
    setup.precision = None
    note, mfu = flops.open_mfu(setup)
    assert "peak of the device: 1e-09 TFLOP/s (datasheet)" in note
    assert note.startswith("an image: 1e-07 GFLOP forward, 3e-07 in training; ")
    for step, image_size, expected in ((5, 32, 1.5), (5, 16, 0.375)):
        speed = Speed(step, image_size, images_per_second=10, waited=0.0)
        assert mfu(speed) == expected


@pytest.mark.parametrize(
    ("name", "dtype", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", torch.float32, 156),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989),
        ("NVIDIA H100 NVL", torch.bfloat16, 835),
        ("NVIDIA B200", torch.float32, 1125),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", torch.bfloat16, None),
        ("Tesla T4", torch.float16, 65),
        ("NVIDIA GeForce RTX 3090 Ti", torch.bfloat16, None),
    ],
)
def test_a_datasheet_is_that_of_the_very_gpu(name, dtype, teraflops):
    assert flops.datasheet(name, dtype) == (teraflops and pytest.approx(teraflops * 1e12))


def test_a_device_is_measured_by_several_products_between_two_waits(monkeypatch):
    seconds = iter(range(100))
    monkeypatch.setattr(flops, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    monkeypatch.setitem(flops.PRODUCTS, "cpu", (16, 10))
    products, matmul = [], torch.matmul
    monkeypatch.setattr(
        torch, "matmul", lambda *words, **more: products.append(matmul(*words, **more))
    )
    found = flops.matmul_flops.__wrapped__(torch.device("cpu"), torch.float32)
    assert found == len(products) * 2 * 16**3 == 10 * 2 * 16**3  # in the second that it took


def test_the_peak_of_a_device_is_that_of_its_fastest_product(monkeypatch):
    times = iter((0, 0.06, 1, 1.03, 2, 2.04))
    monkeypatch.setattr(flops, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    monkeypatch.setitem(flops.PRODUCTS, "cpu", (16, 1))
    found = flops.matmul_flops.__wrapped__(torch.device("cpu"), torch.float32)
    assert found == pytest.approx(2 * 16**3 / 0.03)


def test_on_the_fastest_gpu_a_wait_is_a_small_part_of_what_is_measured():
    size, count = flops.PRODUCTS["cuda"]
    fastest = max(half for half, _ in flops.DATASHEETS.values())
    assert count * 2 * size**3 / (fastest * 1e12) > 100 * 0.03e-3  # seconds of a wait


def test_a_run_logs_what_an_image_costs_and_its_share_of_the_peak(config, monkeypatch, capsys):
    # In CPU time, so that a peak that is measured while other programs run is not too low.
    monkeypatch.setattr(flops, "time", SimpleNamespace(perf_counter=time.process_time))
    flops.matmul_flops.cache_clear()
    train(changed(config, epochs=1, run__log_every_steps=1))
    said = capsys.readouterr().out
    costs = r"an image: [\d.]+ GFLOP forward, .* peak of the device: ([\d.]+) TFLOP/s \(measured"
    assert 1e-4 < float(re.search(costs, said)[1]) < 1e3
    assert re.search(r"MFU \d+%\.", said)
    *_, last = (row for row in logged(config.run.dir) if "train/loss" in row)
    assert 0 < last["train/mfu"] < 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_share_of_the_peak_of_a_gpu_is_logged(config):
    train(changed(config, compute__device="cuda", epochs=20))
    *_, last = (row for row in logged(config.run.dir) if "train/loss" in row)
    assert 0 < last["train/mfu"] < 1
