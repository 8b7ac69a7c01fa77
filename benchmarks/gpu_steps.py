# ruff: noqa: PLC0415 - a measurement imports what it needs, and nothing else
"""Measurements of the first hour on a GPU that no other script makes; `gpu.py` calls them.

    python benchmarks/gpu_steps.py repeat --words cifar10_speed --cifar CIFAR --runs 10
    python benchmarks/gpu_steps.py peers --peers FOLDER --cifar CIFAR   # such as airbench's
    python benchmarks/gpu_steps.py compile            # the modes of torch.compile
    python benchmarks/gpu_steps.py decode --photos FOLDER      # nvJPEG, and CPU workers
    python benchmarks/gpu_steps.py checkpointing      # memory and images/s of fine-tuning
    python benchmarks/gpu_steps.py evaluations --photos FOLDER --words folder   # memory, saves
    python benchmarks/gpu_steps.py machine            # the first that a machine is asked

`repeat` trains in one process, as airbench does, after a run that only warms up. Its seconds are
those of airbench: from when the first batch is asked for to the end of the last step, and those of
the evaluation; opening images and saving are not in them. `--mode` is one of torch.compile's. With
`--tune` cuDNN searches for the fastest convolutions in the run that warms up, which a run of so few
steps leaves out otherwise. The others time steps after some that are not timed.

Prints and writes `results/gpu-NAME.json`. On a CPU (`--device cpu --tiny`) all but `peers` run too.
"""

import argparse
import contextlib
import re
import runpy
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import measurements

ABOUT = "augment data models optim precision presets train"
MODES = ("none", "default", "reduce-overhead", "max-autotune-no-cudagraphs")
NETWORKS = (("resnet50", 224, 256), ("airbench96", 32, 2000))  # name, pixels, images of a batch
TUNED = "convnext_tiny", 224, 128  # of timm
STEPS = 20  # that are timed
Rows = dict[str, list[dict[str, float]]]


def now(device: str) -> float:
    """The clock, when the device has done all that it was told to."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def repeat(given: argparse.Namespace) -> Rows:
    """Train a preset with a seed each: its seconds, those of its first step, and top-1."""
    import image_classifier.train as module
    from image_classifier import precision
    from image_classifier.cli import main
    from image_classifier.data import loader
    from image_classifier.data.loader import TrainData

    loader.load, loader.load_shared = once(loader.load), once(loader.load_shared)
    if given.tune:
        precision.STEPS_FOR_TUNING = 0
    if given.mode:
        compile_in(given.mode)
    clock: dict[str, float] = {}
    scores: list[float] = []
    own_batches, own_evaluate = TrainData.batches, module.evaluate

    def batches(data: Any, start: int, stop: int) -> Iterator[Any]:  # noqa: ANN401
        clock["began"] = now(given.device)
        for number, batch in enumerate(own_batches(data, start, stop)):
            yield batch
            if not number:
                clock["first"] = now(given.device)

    def evaluate(*words: Any) -> Any:  # noqa: ANN401
        clock["trained"] = now(given.device)
        found = own_evaluate(*words)
        scores.append(100 * found.value("top1"))
        clock["ended"] = now(given.device)
        return found

    TrainData.batches, module.evaluate = batches, evaluate
    rows = []
    for number in range(-(given.runs > 1), given.runs):
        words = ["train", *shlex.split(given.words), "--seed", str(given.seed + max(0, number))]
        words += ["--data.name", "folder", "--data.root", str(given.cifar), "--run.trackers"]
        words += ["--run.evaluate-every-epochs", "1000", "--compute.device", given.device]
        with tempfile.TemporaryDirectory() as folder:
            code = main([*words, "--run.processes", "1", "--run.dir", f"{folder}/run"])
        if code:
            sys.exit(code)
        row = {"seconds": clock["ended"] - clock["began"], "top1_percent": scores[-1]}
        row["evaluation_seconds"] = clock["ended"] - clock["trained"]
        row["first_step_seconds"] = clock["first"] - clock["began"]
        print(f"run {number}: {row}", flush=True)
        rows.append(row)
    return {f"{given.words} {given.mode}{' tuned' * given.tune}".strip(): rows[given.runs > 1 :]}


def compile_in(mode: str) -> None:
    """Let `Module.compile` use a mode of torch.compile."""
    import torch

    own_compile = torch.nn.Module.compile

    def compile_in_mode(network: Any, **options: bool) -> None:  # noqa: ANN401
        own_compile(network, mode=mode, **options)
        call = network._compiled_call_impl

        def call_and_copy(*words: Any, **others: Any) -> Any:  # noqa: ANN401
            torch.compiler.cudagraph_mark_step_begin()
            return call(*words, **others).clone()  # a CUDA graph writes over its results

        network._compiled_call_impl = call_and_copy

    torch.nn.Module.compile = compile_in_mode


def once(load: Callable[..., Any]) -> Callable[..., Any]:
    """`load` of a source of images, which reads a source of that many only once."""
    found: dict[int, Any] = {}

    def load_once(source: Any, *words: Any, **others: Any) -> Any:  # noqa: ANN401
        if len(source) not in found:
            found[len(source)] = load(source, *words, **others)
        return found[len(source)]

    return load_once


def peers(given: argparse.Namespace) -> Rows:
    """Run each script on CIFAR-10 in the file that it would download: its seconds, all in all.

    It is as it came, but for how often it trains: `--runs` times; and with `--mode` for the mode of
    torch.compile, where accuracy alone is asked for.
    """
    import numpy as np
    import torch
    from PIL import Image

    own = sys.argv
    rows: Rows = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("cifar10").mkdir()
        classes = sorted(path.name for path in (given.cifar / "train").iterdir())
        for split in ("train", "test"):
            paths = sorted((given.cifar / split).glob("*/*"))
            images = torch.from_numpy(np.stack([np.asarray(Image.open(path)) for path in paths]))
            labels = torch.tensor([classes.index(path.parent.name) for path in paths])
            saved = {"images": images, "labels": labels, "classes": classes}
            torch.save(saved, f"cifar10/{split}.pt")
        scripts = sorted(given.peers.glob(f"{given.script}.py"))
        if not scripts:
            sys.exit(f"there is no {given.script}.py in {given.peers}: pack it by --peers")
        for script in scripts:
            print(f"peer {script.name}", flush=True)
            code = re.sub(
                r"for run in range\(\d+\)", f"for run in range({given.runs})", script.read_text()
            )
            if given.mode:
                code, found = re.subn(r"\bmode=(['\"])[\w-]+\1", f"mode={given.mode!r}", code)
                if not found:
                    sys.exit(f"{script.name} names no mode of torch.compile")
            copy = Path(script.name).resolve()
            copy.write_text(code)
            sys.argv = [str(copy)]
            began = now(given.device)
            runpy.run_path(str(copy), run_name="__main__")
            rows[script.name] = [{"seconds": now(given.device) - began}]
    sys.argv = own  # which the result names
    return rows


def rate(step: Callable[[], object], images: int, given: argparse.Namespace) -> dict[str, float]:
    """Images per second of some steps, the seconds of the first, and the memory that they take."""
    import torch

    began = now(given.device)
    step()
    first = now(given.device) - began
    steps = 2 if given.tiny else STEPS
    for _ in range(steps // 2):
        step()
    began = now(given.device)
    for _ in range(steps):
        step()
    found = {"images_per_second": steps * images / (now(given.device) - began)}
    if given.device == "cuda":
        found["peak_gb"] = torch.cuda.max_memory_allocated() / 2**30
    return found | {"first_step_seconds": first}


def train_step(
    model: Any,  # noqa: ANN401
    size: int,
    batch: int,
    given: argparse.Namespace,
    forward: Callable[[Any], Any] | None = None,
) -> Callable[[], None]:
    """A step of SGD in bf16 on images of noise; `forward` in place of the model's."""
    import torch

    images = torch.randn(batch, 3, size, size, device=given.device)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (batch,), device=given.device)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.SGD(weights, lr=1e-4, momentum=0.9, fused=True)

    def step() -> None:
        with torch.autocast(given.device, torch.bfloat16):
            loss = torch.nn.functional.cross_entropy((forward or model)(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def compiled(given: argparse.Namespace) -> Rows:
    """Training steps of two networks of the project in each mode of torch.compile."""
    import torch
    from image_classifier.config import ModelConfig
    from image_classifier.models import build_model

    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    rows: Rows = {}
    for name, size, batch in NETWORKS[given.tiny :]:
        batch = 8 if given.tiny else batch  # noqa: PLW2901
        for mode in MODES[: 2 if given.tiny else None]:
            config = ModelConfig(name=name)
            model = build_model(config, 10, size)
            if name == "airbench96":
                model.fit(torch.randn(2000, 3, size, size))
            model = model.to(given.device, memory_format=torch.channels_last)
            if mode != "none":
                model.compile(mode=mode)
            measured(rows, f"{name} {mode}", train_step(model, size, batch, given), batch, given)
            del model
            torch._dynamo.reset()
    return rows


def measured(
    rows: Rows, name: str, step: Callable[[], object], images: int, given: argparse.Namespace
) -> None:
    """Add a row; one that fails says why, and the next ones are measured all the same."""
    import torch

    if given.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        rows[name] = [rate(step, images, given)]
        print(name, rows[name], flush=True)
    except Exception as error:
        given.failures[name] = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
        print(name, given.failures[name], flush=True)


def decode(given: argparse.Namespace) -> Rows:
    """Whole files to pixels by torchvision on the device; and crops of them by CPU workers."""
    import torch
    from image_classifier.config import DataConfig
    from image_classifier.data import Samples, open_dataset, worker_count, worker_counts
    from image_classifier.runtime.machine import num_cores
    from torchvision.io import ImageReadMode, decode_jpeg

    rows: Rows = {}
    source = open_dataset(DataConfig(name="folder", root=str(given.photos)), "train")
    files = [
        torch.frombuffer(bytearray(Path(p).read_bytes()), dtype=torch.uint8)
        for p in map(source.paths.__getitem__, range(min(256, len(source))))
    ]
    for count in (16, 64, 256):
        part = files[:count]
        step = lambda part=part: decode_jpeg(part, mode=ImageReadMode.RGB, device=given.device)  # noqa: E731
        if given.device == "cpu":
            step = lambda part=part: [decode_jpeg(one, mode=ImageReadMode.RGB) for one in part]  # noqa: E731
        measured(rows, f"torchvision on {given.device}, {count} at once", step, len(part), given)
    samples = Samples(source, DataConfig(image_size=224))
    for workers in worker_counts(num_cores()):
        images_per_second = worker_count.rate(samples, workers)
        rows[f"{workers} CPU workers"] = [{"images_per_second": images_per_second}]
        print(workers, rows[f"{workers} CPU workers"], flush=True)
    return rows


def checkpointing(given: argparse.Namespace) -> Rows:
    """Steps of a network of timm: all layers, with and without checkpointing; its head alone."""
    import torch
    from timm import create_model

    name, size, batch = ("convnext_atto", 32, 8) if given.tiny else TUNED
    rows: Rows = {}
    for way in ("all layers", "all layers, checkpointing", "frozen features"):
        model = create_model(name, num_classes=10).to(
            given.device, memory_format=torch.channels_last
        )
        model.set_grad_checkpointing(way.endswith("checkpointing"))
        forward = None
        if way == "frozen features":
            model.requires_grad_(False)
            model.get_classifier().requires_grad_(True)

            def forward(images: Any, model: Any = model) -> Any:  # noqa: ANN401
                with torch.no_grad():
                    features = model.forward_features(images)
                return model.forward_head(features)

        step = train_step(model, size, batch, given, forward)
        measured(rows, f"{name}, {way}", step, batch, given)
        del model, step
    return rows


def machine(given: argparse.Namespace) -> Rows:
    """What a report of a fault needs to name; and whether the GPU may read memory of workers."""
    import resource

    import torch
    import torchvision
    from image_classifier.data import shared_memory
    from image_classifier.runtime.machine import device_name, host_memory_bytes, num_cores

    device = torch.device(given.device)
    lockable = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    row = {"cores": float(num_cores()), "memory_gb": host_memory_bytes() / 2**30}
    print(f"Python {sys.version}; torch {torch.__version__}, torchvision {torchvision.__version__}")
    print(f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}")
    print(f"{device_name(device)}; {row}")
    print(f"ulimit -l: {'unlimited' if lockable == resource.RLIM_INFINITY else lockable}")
    if given.device == "cuda":
        row["gpu_gb"] = torch.cuda.mem_get_info()[1] / 2**30
        print(torch.cuda.get_device_properties(device))
        memory = shared_memory.shared((2**26,), torch.uint8)
        if not shared_memory.page_lock(memory):
            sys.exit(f"64 MB can't be page-locked: {shared_memory.refusals[-1]}")
    return {device_name(device): [row]}


def evaluations(given: argparse.Namespace) -> Rows:
    """Memory of the GPU after evaluations of streamed images, and how long saves stop a run."""
    import image_classifier.train as module
    import torch
    from image_classifier.checkpoints import Checkpoints
    from image_classifier.cli import main

    reserved: list[float] = []
    saves: list[float] = []
    own_evaluate, own_save = module.evaluate, Checkpoints.save

    def evaluate(*words: Any) -> Any:  # noqa: ANN401
        found = own_evaluate(*words)
        reserved.append(torch.cuda.memory_reserved() / 2**30 if given.device == "cuda" else 0.0)
        return found

    def save(*words: Any) -> None:  # noqa: ANN401
        began = now(given.device)
        own_save(*words)
        saves.append(time.perf_counter() - began)

    module.evaluate, Checkpoints.save = evaluate, save
    words = ["train", *shlex.split(given.words), "--data.root", str(given.photos)]
    words += ["--data.where", "stream", "--run.evaluate-every-epochs", "0.2", "--run.trackers"]
    with tempfile.TemporaryDirectory() as folder:
        code = main([*words, "--run.processes", "1", "--run.dir", f"{folder}/run"])
    if code:
        sys.exit(code)
    row = {"first_evaluation_gb": reserved[0], "last_evaluation_gb": reserved[-1]}
    row |= {"evaluations": float(len(reserved)), "longest_save_seconds": max(saves)}
    print(row, flush=True)
    return {given.words: [row]}


VERBS = {"machine": machine, "repeat": repeat, "peers": peers, "compile": compiled}
VERBS |= {"decode": decode, "checkpointing": checkpointing, "evaluations": evaluations}


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("verb", choices=VERBS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="as small as can be")
    parser.add_argument(
        "--results", type=Path, default=measurements.RESULTS, help="folder of the result"
    )
    parser.add_argument("--words", default="cifar10_speed", help="a preset, and options")
    parser.add_argument("--script", default="*", help="of the folder of peers (all)")
    parser.add_argument("--mode", default="", help="of torch.compile (default; a peer's own)")
    parser.add_argument("--tune", action="store_true", help="cuDNN searches, untimed")
    parser.add_argument("--runs", type=int, default=1, help="with a seed each (1)")
    parser.add_argument("--seed", type=int, default=0, help="of the first (0)")
    for what in ("cifar", "photos", "peers"):
        parser.add_argument(f"--{what}", type=lambda text: Path(text).resolve())
    given = parser.parse_args()
    given.failures = {}
    rows = VERBS[given.verb](given)
    measurements.write(
        given.results / f"gpu-{given.verb}.json",
        f"The first hour on a GPU: {given.verb}",
        f"{VERBS[given.verb].__doc__} On {given.device}.",
        measurements.measured(rows, given.failures),
    )


if __name__ == "__main__":
    main()
