"""The number of workers is measured where that is worth it."""

import pytest
import torch
from conftest import changed

from image_classifier.data import shared_memory, worker_count
from image_classifier.data.datasets import open_dataset
from image_classifier.data.samples import Samples
from image_classifier.runtime.distributed import World


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_number_of_workers_is_measured_if_that_is_worth_it(on_photos, device, monkeypatch):
    data = changed(on_photos, data__workers="auto", data__limit=0).data
    samples, world = Samples(open_dataset(data, "train"), data), World(torch.device(device))
    monkeypatch.setattr(worker_count, "num_cores", lambda: 8)
    monkeypatch.setattr(worker_count, "PROBED_TOGETHER", 5)  # of 12: batches of equal size
    for module in (shared_memory, worker_count):
        monkeypatch.setattr(module, "PART_SIZES", (1, 64))
    assert worker_count.rate(samples, 3) > 10
    assert worker_count.choose_workers(data, samples, world)[1].startswith("decoding takes only")
    found = {1: 100, 2: 190, 4: 300, 8: 310}
    monkeypatch.setattr(worker_count, "WORTH_SECONDS", 0)
    monkeypatch.setattr(worker_count, "rate", lambda _, count: found[count])
    count, why = worker_count.choose_workers(data, samples, world)
    assert count == 4
    assert ("8: 310" in why) == (device == "cuda")  # the model needs half of the cores of a CPU
