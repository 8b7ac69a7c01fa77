"""`--precision auto` without a measurement: by the generation of a GPU, or as a run began."""

import torch
from conftest import changed

from image_classifier import precision as precision_module
from image_classifier.data import TrainData
from image_classifier.precision import settle_precision
from image_classifier.runtime.distributed import World
from image_classifier.runtime.machine import usual_precision

CPU = World(torch.device("cpu"))


def test_without_the_tool_that_measures_a_cpu_computes_as_the_run_began_or_in_fp32(
    config, monkeypatch
):
    monkeypatch.setattr(precision_module, "find_tools", lambda _: {})
    auto = changed(config, precision="auto")
    data = TrainData(auto, CPU)
    assert settle_precision(auto, data, CPU)[0].precision == "fp32"
    saved = {"config": {"precision": "bf16"}}
    resumed, why = settle_precision(auto, data, CPU, saved)
    assert (resumed.precision, why) == ("bf16", "as this run began")


def test_a_gpu_takes_the_format_that_its_generation_is_made_for(monkeypatch):
    for capability, name in (((8, 0), "bf16"), ((7, 5), "fp16"), ((6, 1), "fp32")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert usual_precision(torch.device("cuda", 0)) == name
