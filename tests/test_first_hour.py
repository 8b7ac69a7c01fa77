"""The first hour on a GPU: what `benchmarks/gpu.py` calls is there, and nothing stops it."""

import argparse
import gzip
import json
import os
import re
import runpy
import shlex
import shutil
import sys
import tarfile

import figures
import gpu
import measurements
import pytest
from conftest import PROJECT, ROOT, pyproject, python
from image_classifier import cli
from image_classifier.tools.bench import command as bench
from image_classifier.tools.bench.tips import find_tips


class ParsedError(Exception):
    """The command line was understood."""


@pytest.mark.parametrize("on_gpu", [True, False])
def test_every_command_of_the_stages_is_understood(on_gpu, monkeypatch):
    parse = argparse.ArgumentParser.parse_args

    def parse_only(*words):
        raise ParsedError(parse(*words))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    monkeypatch.setattr(cli, "run_in_processes", lambda *_: 0)
    monkeypatch.setattr(bench, "attempt", lambda _: 0)
    monkeypatch.syspath_prepend(ROOT)
    for _, commands in gpu.stages(on_gpu).values():
        for words in (shlex.split(command.words) for command in commands):
            if words[1] == "pytest":
                assert words[2:4] == ["-m", "gpu"]  # or conftest.py hides the GPU
                tests = (PROJECT / "tests" / "test_gpu.py").read_text()
                wanted = words[words.index("-k") + 1].split(" or ") if "-k" in words else ["gpu"]
                assert all(re.search(rf"def test_\w*{part}", tests) for part in wanted)
            elif words[0] == "train.py":
                assert cli.main(words[1:] if words[1] == "bench" else ["train", *words[1:]]) == 0
            else:
                is_module = words[0] == "-m"
                monkeypatch.setattr(sys, "argv", words[is_module:])
                begin = runpy.run_module if is_module else runpy.run_path
                name = words[1] if is_module else str(ROOT / words[0])
                with pytest.raises(ParsedError) as parsed:
                    begin(name, run_name="__main__")
                if known := vars(parsed.value.args[0]).get("words"):
                    assert cli.main(["train", *shlex.split(known)]) == 0
    tips = " ".join(gpu.BEGINNINGS[f"tips_{number}"] for number in (1, 2, 3))
    assert sorted(tips.split()) == sorted(find_tips())


def test_a_command_that_hangs_is_killed_and_the_next_goes_on(tmp_path, monkeypatch, capfd):
    hangs = "-c 'import os; print(os.fork(), flush=True); import time; time.sleep(99)'"
    made = {1: ("hangs", [gpu.Command(hangs, 1)]), 2: ("ends", [gpu.Command("-c print(7)")])}
    made[3] = "cannot", [gpu.Command("-c print(8)", needs=("gpu",))]
    monkeypatch.setattr(gpu, "stages", lambda *_: made)
    monkeypatch.setattr(gpu, "prepare", lambda *_: {})
    monkeypatch.setattr(gpu, "tell", lambda *_: {"torch": "False", "gpu": None})
    monkeypatch.setattr(gpu, "WORK", tmp_path / "work")
    assert [gpu.main(["run", "--out", str(tmp_path)]) for _ in range(2)] == [1, 1]
    found = json.loads((tmp_path / "gpu.json").read_text())["commands"]
    assert [one["code"] for one in found.values()] == ["killed at its limit", ""]
    assert found["-c print(7)"]["printed"] == ["7"]
    said = capfd.readouterr().out
    assert said.count("passed before") == 1
    assert said.count("needs a GPU: -c print(8)") == 2


def test_what_is_packed_has_a_project_the_benchmarks_and_their_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "wheels", lambda folder, *_: folder.mkdir())
    archive = tmp_path / "gpu.tar"
    gpu.main(["pack", "--archive", str(archive)])
    with tarfile.open(archive) as packed:
        names = packed.getnames()
        commit = packed.extractfile("gpu/COMMIT").read().decode()
    wanted = f"{PROJECT.name}/train.py", "benchmarks/gpu.py", "faults/kills.py"
    assert {f"gpu/{path}" for path in wanted} <= {*names}
    assert commit == measurements.commit()


def test_what_a_command_printed_becomes_a_row_for_each_run_but_not_for_the_one_that_warms_up():
    def rows(*lines, code=0):
        return gpu.numbers({"code": code, "printed": lines, "seconds": 60.0})

    def trained(run, seconds):
        return (
            f"|  {run}  |      0  |     0.6720  |   0.6368  |               |        0.2268  |",
            f"|         |   eval  |     0.9610  |   0.8946  |       0.9050  |        {seconds}  |",
        )

    first = {"seconds": 1.5828, "top1_percent": 90.5}
    assert rows(*trained("warmup", 246.0), *trained(0, 1.5828)) == [first]
    assert rows(*trained("warmup", 246.0), code="killed at its limit") == []
    assert rows(*trained(0, 130.9)) == [{"top1_percent": 90.5}]
    runs = [f"run {number}: {{'seconds': {3.0 + number}}}" for number in (-1, 0, 1)]
    assert rows(*runs, code="killed at its limit") == [{"seconds": 3.0}, {"seconds": 4.0}]
    assert rows("=== 42 passed, 6 warnings in 71.03s ===") == [{"passed": 42.0, "seconds": 60.0}]
    assert rows("**kept** 70 s") == [{"passed": 1.0, "failed": 0.0, "seconds": 60.0}]
    assert rows("Traceback", code=1) == []


def test_what_the_pages_say_of_a_gpu_is_of_commands_of_the_stages():
    asked = {command.words for _, commands in gpu.stages(True).values() for command in commands}
    contenders = {contender for *_, result, contender in figures.REACHED if result == "gpu"}
    assert len(contenders) == 2
    assert contenders <= asked
    assert figures.beside_airbench(measurements.load("gpu"))


# In the order in which the first calls show it, from what is most likely to fail on a GPU.
FIRST = ("machine", "train.py smoke", "tests/test_gpu.py", "--profile", "-m faults")
FIRST += ("training.py", "evaluations", "airbench94_muon")
THEN = (
    "train.py bench",
    "RESULTS compile",
    "decode",
    "checkpointing",
    "--seed 1",
    "--size 128",
    "finetune",
)


def test_what_may_fail_on_a_gpu_comes_before_what_measures_gains():
    made = gpu.stages(True)

    def stage(part):
        return min(
            number
            for number, (_, commands) in made.items()
            if any(part in command.words for command in commands)
        )

    first = [stage(part) for part in FIRST]
    assert first == sorted(first)
    assert max(first) < min(stage(part) for part in THEN)


def test_a_machine_is_asked_what_it_is_before_anything_is_installed_there(tmp_path, monkeypatch):
    made = {0: ("asks", [gpu.Command("-c print(0)")]), 1: (f"nothing, {gpu.TOGETHER}", [])}
    made |= {2: ("needs all", [gpu.Command("-c 2")]), 3: ("too", [gpu.Command("-c 3")])}
    prepared = []
    monkeypatch.setattr(gpu, "stages", lambda *_: made)
    monkeypatch.setattr(gpu, "prepare", lambda *_: prepared.append(1) or {"PHOTOS": "."})
    monkeypatch.setattr(gpu, "tell", lambda *_: {"torch": "False", "gpu": None})
    monkeypatch.setattr(gpu, "WORK", tmp_path / "work")
    assert gpu.main(["run", "--out", str(tmp_path), "--stages", "0", "1"]) == 0
    assert prepared == []
    assert gpu.main(["run", "--out", str(tmp_path), "--stages", "0", "2", "3"]) == 0
    assert prepared == [1]


MACHINE = """
import runpy, sys
sys.modules |= dict.fromkeys({names})
sys.argv = ["gpu_steps.py", "machine", "--device", "cpu", "--results", {folder!r}]
runpy.run_path({script!r}, run_name="__main__")
"""


def test_to_ask_it_needs_nothing_but_torch_and_torchvision(tmp_path):
    needed = pyproject(PROJECT)["project"]["dependencies"]
    names = {re.match(r"[\w-]+", one)[0] for one in needed} - {"torch", "torchvision"}
    names -= {"numpy", "pillow"}  # torchvision has them
    names = [name.replace("scikit-learn", "sklearn") for name in names]
    script = str(ROOT / "benchmarks" / "gpu_steps.py")
    code = MACHINE.format(names=names, folder=str(tmp_path), script=script)
    paths = f"{PROJECT / 'src'}{os.pathsep}{ROOT / 'benchmarks'}"
    assert " cores; " in python("-c", code, PYTHONPATH=paths)
    assert (tmp_path / "gpu-machine.json").exists()


def test_of_a_profile_the_kernels_of_a_step_and_the_busy_share_of_the_gpu_are_kept(tmp_path):
    def event(cat, ts, dur, name="x"):
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur}

    steps = [event("user_annotation", 1000.0 * n, 900.0, f"ProfilerStep#{n}") for n in (13, 14)]
    host = [event("cpu_op", 13_000.0, 500.0), event("cuda_runtime", 13_000.0, 5.0)]
    # Two overlap, in two streams; then the GPU waits.
    device = [event("kernel", 13_100.0, 100.0), event("kernel", 13_150.0, 100.0)]
    device += [event("gpu_memcpy", 13_450.0, 50.0), event("kernel", 13_500.0, 100.0)]
    device += [event("gpu_user_annotation", 13_000.0, 2000.0, "ProfilerStep#13")]
    trace = tmp_path / "trace.json.gz"
    said = ["phases of a step:", "  wait for data      0.12 ms", "  forward            3.40 ms"]
    known = {"phases_ms": {"wait for data": 0.12, "forward": 3.4}}
    for events, more in (
        (steps + host, {}),
        (steps + host + device, {"kernels_per_step": 1.5, "busy_share": 0.6}),
    ):
        trace.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
        assert gpu.profile(trace, said) == known | more


def test_a_command_leaves_what_its_profile_found(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "WORK", tmp_path)
    words = "import gzip, pathlib, sys; p = pathlib.Path(sys.argv[1], 'profile'); p.mkdir"
    words += "(parents=True); print('  copy  1.00 ms'); p.joinpath('trace.json.gz').write_bytes"
    words = f'-c "{words}(gzip.compress(sys.argv[2].encode()))" RUN'
    for trace, found in (
        ('{"traceEvents": []}', {"profile": {"phases_ms": {"copy": 1.0}}}),
        ("{", {}),
    ):
        with (tmp_path / "log").open("a") as log:
            made = gpu.run_command(f"{words} '{trace}'", 60, {}, log)
        assert (made["code"], made["results"]) == ("", found)


def test_the_result_keeps_what_profiles_found(tmp_path, monkeypatch):
    results = shutil.copytree(measurements.RESULTS, tmp_path / "results")
    monkeypatch.setattr(measurements, "RESULTS", results)
    monkeypatch.setattr(sys, "argv", [str(ROOT / "benchmarks" / "gpu.py")])
    commands = [one.words for _, made in gpu.stages(True).values() for one in made]
    profiled = [words for words in commands if "--profile" in words]
    machine = measurements.machine() | {"torch": "2.15 13.2 91900 0.30 True", "commit": "0"}
    state = tmp_path / "state.json"
    for share, words in enumerate(profiled[:2]):
        one = {"code": "", "seconds": 9.0, "printed": [], "results": {}}
        one["results"]["profile"] = {"busy_share": share}
        state.write_text(json.dumps({"machine": machine, "commands": {words: one}}))
        gpu.main(["report", str(state)])
    found = {words: {"busy_share": share} for share, words in enumerate(profiled[:2])}
    assert measurements.load("gpu")["profiles"] == found
