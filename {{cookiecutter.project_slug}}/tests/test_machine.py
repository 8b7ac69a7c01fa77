"""Cores, memory and number format are the machine's; without a usable GPU it says why."""

import contextlib
import errno
import os
import re
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from conftest import changed
from test_datasets import CLASSES, LABELS, PIXELS

from image_classifier import precision, settle
from image_classifier.config import ComputeConfig, DataConfig
from image_classifier.data import (
    autotune,
    loader,
    open_dataset,
    samples,
    worker_count,
)
from image_classifier.data.autotune import common_side
from image_classifier.data.datasets.source import Source
from image_classifier.data.loader import EvalData
from image_classifier.data.samples import Samples
from image_classifier.data.splits import load_spread
from image_classifier.errors import UserError
from image_classifier.runtime import distributed, machine
from image_classifier.runtime.distributed import (
    World,
    choose_device,
)
from image_classifier.runtime.launch import attempt

CPU = torch.device("cpu")


# Of a container, and of a job of SLURM whose limits are those of a cgroup above its own.
@pytest.mark.parametrize("cgroup", ["0::/", "0::/job_7/step_0"])
def test_the_cgroups_of_a_job_limit_cores_and_memory(cgroup, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "affinity", lambda _: range(8))
    monkeypatch.setattr(machine, "proc", {"self/cgroup": f"{cgroup}\n"}.get)
    folder = tmp_path / cgroup.split("/")[1]
    folder.mkdir(exist_ok=True)
    for quota, cores in {"max 100000": 8, "200000 100000": 2, "50000 100000": 1}.items():
        (folder / "cpu.max").write_text(f"{quota}\n")
        assert machine.num_cores(tmp_path) == cores
    (folder / "memory.max").write_text(f"{2**30}\n")
    (folder / "memory.current").write_text(f"{2**30 - 7}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {2**29 - 7}\nactive_file 1\n")
    assert machine.host_memory_bytes(tmp_path) == 2**29  # files that were read are no loss
    assert machine.host_memory_bytes(tmp_path.parent / "nowhere") > 2**29


def test_cgroups_of_version_1_limit_cores_and_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "affinity", lambda _: range(8))
    said = "4:memory:/job_7/step_0\n2:cpuacct,cpu:/job_7\n1:name=systemd:/\n0::/\n"
    monkeypatch.setattr(machine, "proc", {"self/cgroup": said}.get)
    files = {"cpu/job_7/cpu.cfs_period_us": 100_000, "memory/job_7/memory.usage_in_bytes": 2**29}
    files |= {"memory/memory.limit_in_bytes": 2**63 - 4096, "memory/memory.usage_in_bytes": 2**40}
    files |= {"memory/memory.stat": "", "memory/job_7/memory.limit_in_bytes": 2**30}
    files["memory/job_7/memory.stat"] = "inactive_file 5\ntotal_inactive_file 9"
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{content}\n")
    assert machine.host_memory_bytes(tmp_path) == 2**29 + 9
    for quota, cores in {-1: 8, 300_000: 3}.items():
        (tmp_path / "cpu/job_7/cpu.cfs_quota_us").write_text(f"{quota}\n")
        assert machine.num_cores(tmp_path) == cores


def test_memory_of_a_gpu_that_torch_keeps_unused_is_free(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 900)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 200)
    assert machine.device_memory_bytes(torch.device("cuda", 0)) == 701


def test_threads_are_those_that_the_user_asks_for_and_torch_computes_on_them(monkeypatch):
    def threads(processes=1, **variables):
        monkeypatch.setattr(os, "environ", variables)
        return machine.num_threads(processes)

    monkeypatch.setattr(machine, "num_cores", lambda: 8)
    assert [threads(processes) for processes in (1, 3, 20)] == [8, 2, 1]
    asked = ("1", "4,2", "16", "many", "0")
    assert [threads(OMP_NUM_THREADS=text) for text in asked] == [1, 4, 16, 8, 8]
    by_torchrun = {"TORCHELASTIC_MAX_RESTARTS": "0"}  # which sets 1 by itself
    assert [threads(2, OMP_NUM_THREADS=text, **by_torchrun) for text in "12"] == [4, 2]
    monkeypatch.setattr(distributed, "num_threads", lambda processes: 3 // processes)
    monkeypatch.setattr(os, "environ", {})
    with machine.one_thread(), distributed.join_world(ComputeConfig(device="cpu")):
        assert torch.get_num_threads() == 3
    assert torch.get_num_threads() != 3  # the first block restores it


def test_ranks_on_a_machine_share_its_cores(monkeypatch, photos):
    world = World(CPU, local_size=2)  # with nobody to talk to
    for module in (worker_count, samples):
        monkeypatch.setattr(module, "num_cores", lambda: 8)
    monkeypatch.setattr(worker_count, "PART_SIZES", (1, 64))
    data = DataConfig(name="folder", root=str(photos))
    source = open_dataset(data, "train")
    kept = samples.Samples(source, data)
    on_gpu = replace(world, device=torch.device("cuda", 0))
    assert worker_count.choose_workers(data, kept, world)[0] == 2  # the model needs the other two
    assert worker_count.choose_workers(data, kept, on_gpu)[0] == 4
    threads = Mock(side_effect=samples.ThreadPoolExecutor)
    monkeypatch.setattr(samples, "ThreadPoolExecutor", threads)
    # Of images that decode in no time one thread has the interpreter's lock for all of it.
    for locked, most in ((1e-9, 4), (1e9, 1)):
        threads.reset_mock()
        monkeypatch.setattr(samples, "LOCKED_SECONDS", locked)
        load_spread(source, 5, data, Mock(), world)
        list(EvalData(data, "val", world).batches())
        assert {call.args for call in threads.call_args_list} == {(most,)}
    monkeypatch.setattr(autotune, "device_memory_bytes", lambda _: 1000)
    most = int(1000 * autotune.MEMORY_SHARE)
    for needed, device, fits in ((most // 2 + 1, CPU, False), (most // 2 + 1, on_gpu.device, True)):
        assert autotune.fits_memory(needed, device, world) == fits


def test_a_rank_computes_with_its_share_of_the_cores_whichever_launcher_started_it(monkeypatch):
    asked = Mock(return_value=1)
    monkeypatch.setattr(distributed, "num_threads", asked)
    monkeypatch.setattr(distributed, "end_with_parent", Mock())
    monkeypatch.setattr(distributed, "open_store", Mock(side_effect=KeyError("no ranks here")))
    job = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    monkeypatch.setattr(os, "environ", job | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})
    with (
        machine.one_thread(),
        pytest.raises(KeyError, match="no ranks here"),
        distributed.join_world(ComputeConfig(device="cpu")),
    ):
        pass
    asked.assert_called_once_with(4)


def test_these_tests_are_those_of_the_cpu_where_there_is_a_gpu_too():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize(
    ("build", "program", "visible", "reason"),
    [
        (None, "nvidia-smi", "0", ".* without CUDA: uv pip install --python .* --torch-backend .*"),
        (None, None, "0", ".* and there is no NVIDIA driver"),
        ("13.0", None, "0", "Found no NVIDIA driver on your system"),
        ("13.0", None, "-1", "CUDA_VISIBLE_DEVICES is '-1', which hides every GPU: unset it"),
    ],
)
def test_a_run_on_the_cpu_says_why_there_is_no_gpu(build, program, visible, reason, monkeypatch):
    as_torch = RuntimeError("Found no NVIDIA driver on your system. Please check that you have one")
    monkeypatch.setattr(torch.cuda, "init", Mock(side_effect=as_torch))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(machine.shutil, "which", lambda _: program)
    monkeypatch.setattr(os, "environ", {"CUDA_VISIBLE_DEVICES": visible})
    device, why = choose_device("auto", 0, 1)
    assert device == CPU
    assert re.fullmatch(reason, why)
    assert choose_device("cpu", 0, 1) == (CPU, "")  # it was asked for
    with pytest.raises(UserError, match=f"--compute.device cuda: {reason}"):
        choose_device("cuda", 0, 1)


def test_a_gpu_is_used_as_its_generation_allows(monkeypatch):
    cuda, capability = torch.device("cuda", 0), Mock()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_90a", "compute_120"])
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GTX 1080")
    for capability.return_value, format_name in (((8, 0), "bf16"), ((7, 5), "fp16")):
        assert machine.usual_precision(cuda) == format_name
        assert machine.find_accelerator() == ("cuda", "")
    capability.return_value = (6, 1)
    assert machine.usual_precision(cuda) == "fp32"
    found, why = machine.find_accelerator()
    assert found == "cpu"
    assert re.fullmatch("GTX 1080 has compute capability 6.1; torch .* needs 7.5: .*", why)


def test_a_rank_whose_gpu_is_too_old_says_which_it_is_and_how_to_leave_it_out(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", Mock())
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_90a"])
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", [(8, 9), (6, 1)].__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_name", ["RTX 4090", "GTX 1060"].__getitem__)
    assert choose_device("auto", 0, 2) == (torch.device("cuda", 0), "")
    said = "GTX 1060 has compute capability 6.1; .* or hide that GPU by CUDA_VISIBLE_DEVICES"
    with pytest.raises(UserError, match=said):
        choose_device("auto", 1, 2)


def test_what_is_no_cuda_gpu_is_one_of_apple_or_is_refused_and_said(monkeypatch):
    found = Mock(return_value=torch.device("mps"))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", found)
    assert choose_device("auto", 0, 1) == (torch.device("mps"), "")
    with pytest.raises(UserError, match="several processes on one Apple GPU"):
        choose_device("mps", 0, 2)
    found.return_value = torch.device("xpu")
    why = "the xpu device of this machine is not supported: cuda and mps are"
    assert choose_device("auto", 0, 1) == (CPU, why)
    with pytest.raises(UserError, match=f"--compute.device cuda: {why}"):
        choose_device("cuda", 0, 1)


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_unmeasured_a_run_computes_in_fp32_and_fp16_needs_a_cuda_gpu(config, monkeypatch, device):
    monkeypatch.setattr(settle, "function", lambda *_: None)
    world = World(torch.device(device))
    auto = changed(config, precision="auto")
    assert settle.settle(auto, None, world)[0].precision == "fp32"
    asked = precision.Precision("bf16", auto.compute, auto.optim, world.device)
    with asked.autocast():
        assert torch.get_autocast_dtype(device) == torch.bfloat16
    with pytest.raises(UserError, match=f"fp16 needs a CUDA GPU; on {device} use bf16 or fp32"):
        precision.Precision("fp16", auto.compute, auto.optim, world.device)


def test_each_process_has_a_device_of_its_own_or_is_refused(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(distributed, "find_accelerator", lambda: ("cuda", ""))
    monkeypatch.setattr(distributed, "why_too_old", lambda _: "")
    assert choose_device("cpu", 1, 2) == (CPU, "")
    for name in ("auto", "cuda"):
        assert choose_device(name, 1, 2) == (torch.device("cuda", 1), "")
        with pytest.raises(UserError, match=r"3 processes .* --run\.processes 2"):
            choose_device(name, 0, 3)
    assert chosen == 2 * [torch.device("cuda", 1)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", "1")
    for task in "01":  # torchrun in one task of SLURM; two tasks, each of which sees its own GPU
        with pytest.raises(UserError, match=r"2 processes .* there are 1: --run\.processes 1"):
            choose_device("auto", 1, 2)
        monkeypatch.setenv("SLURM_LOCALID", task)
    assert choose_device("auto", 1, 2) == (torch.device("cuda", 0), "")


def test_a_full_disk_is_told_in_a_line_and_another_fault_with_its_traceback(capsys):
    work = Mock(side_effect=[OSError(errno.ENOSPC, "No space left", "a"), RuntimeError("planted")])
    assert [attempt(work), attempt(work)] == [1, 1]
    full, trace, *_, error, blank, failed = capsys.readouterr().err.splitlines()
    assert full.startswith("failed: [Errno 28] No space left: ")
    assert trace.startswith("Traceback")
    assert [error, blank, failed] == ["RuntimeError: planted", "", "failed"]


def test_images_that_are_enlarged_take_the_memory_of_their_new_size(config):
    data = changed(config, data__image_size=64).data
    source = open_dataset(data, "train")  # of 32 x 32
    where, why = autotune.choose_where(data, config.augment.crop, source, World(CPU))
    megabytes = len(source) * 3 * 64**2 / 2**20
    assert (where, why) == ("device", f"{len(source):,} images of 64 x 64 take {megabytes:,.0f} MB")


def test_validation_images_that_take_too_much_memory_are_streamed(on_photos, monkeypatch):
    data = replace(on_photos.data, where="device", workers=0)
    whole = EvalData(data, "val", World(CPU))
    monkeypatch.setattr(loader, "fits_memory", lambda *_: False)
    with contextlib.closing(EvalData(data, "val", World(CPU))) as streamed:
        assert streamed.loader is not None
        for one, other in zip(whole.batches(), streamed.batches(), strict=True):
            assert torch.equal(one.images, other.images)


def test_images_are_where_the_memory_of_every_rank_suffices(config, monkeypatch):
    source = open_dataset(config.data, "train")
    gpu = World(torch.device("cuda", 0))
    free = {"cuda": 2**40, "cpu": 2**40}
    monkeypatch.setattr(autotune, "device_memory_bytes", lambda device: free[device.type])

    monkeypatch.setattr(World, "all_true", lambda _, holds: holds)

    def where():
        return autotune.choose_where(config.data, config.augment.crop, source, gpu)[0]

    assert where() == "device"
    free["cuda"] = 0
    assert where() == "host"
    free["cpu"] = 0
    assert where() == "stream"
    free |= {"cuda": 2**40, "cpu": 2**40}
    monkeypatch.setattr(World, "all_true", lambda *_: False)  # another rank has less
    assert where() == "stream"


def test_ranks_on_a_machine_share_the_memory_for_batches(on_photos, monkeypatch):
    data = replace(on_photos.data, workers=1)
    samples = Samples(open_dataset(data, "train"), data)
    batches = 10 * 4 * 3 * 32**2 / autotune.SLOTS_SHARE
    monkeypatch.setattr(autotune, "host_memory_bytes", lambda: batches)
    alone, four = (World(CPU, local_size=n) for n in (1, 4))
    slots = [len(autotune.open_loader(samples, data, w, Mock())[0].images) for w in (alone, four)]
    assert slots == [5, 2]


def test_images_that_are_no_squares_have_no_side_in_common():
    square = Source(LABELS, CLASSES, PIXELS[:, :8])
    assert [common_side(source) for source in (square, Source(LABELS, CLASSES, PIXELS))] == [
        8,
        None,
    ]


def test_images_that_are_drawn_anew_are_not_kept_as_they_were_first(config):
    source = Source(LABELS, CLASSES, PIXELS[:, :8], is_random=True)
    where, why = autotune.choose_where(config.data, config.augment.crop, source, World(CPU))
    assert (where, why) == ("stream", "images differ in size, or each time that they are read")


def test_a_batch_may_be_of_all_images():
    autotune.check_batch_size(12, 12, 2, 3)
    with pytest.raises(UserError, match="is more than there are training images: 12"):
        autotune.check_batch_size(18, 12, 2, 3)


def test_a_run_beside_others_has_its_share_of_the_cores_for_threads_and_workers(monkeypatch):
    monkeypatch.setattr(machine, "affinity", lambda _: range(8))
    monkeypatch.setattr(machine, "cgroups", lambda *_: [])
    for name in ("OMP_NUM_THREADS", "RUN_CORES"):
        monkeypatch.delenv(name, raising=False)
    assert machine.num_cores() == machine.num_threads(1) == 8
    monkeypatch.setenv("RUN_CORES", "4")
    assert machine.num_cores() == machine.num_threads(1) == 4
    assert machine.num_threads(2) == 2
    source = Mock(__len__=lambda _: 10_000)
    monkeypatch.setattr(worker_count, "seconds_per_image", lambda _: 0.0)
    world = World(torch.device("cuda", 0), local_size=2)
    chosen = worker_count.choose_workers(DataConfig(), Mock(source=source), world)
    assert chosen[0] == 2


def test_a_quota_gives_no_cores_that_a_process_may_not_use(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "affinity", lambda _: range(2))
    (tmp_path / "cpu.max").write_text("1600000 100000\n")
    assert machine.num_cores(tmp_path) == 2


@pytest.mark.parametrize("where", ["device", "stream"])
def test_an_evaluation_takes_as_many_images_at_once_as_fit(on_photos, where):
    data = replace(on_photos.data, where=where, workers=0)
    world = World(CPU)
    with contextlib.closing(EvalData(data, "val", world, batch_size=3)) as images:
        assert [len(batch.labels) for batch in images.batches()] == [3, 1]
