"""The first hour on a GPU: what `benchmarks/gpu.py` calls is there, and nothing stops it."""

import argparse
import json
import re
import runpy
import shlex
import sys
import tarfile

import figures
import gpu
import measurements
import pytest
from conftest import PROJECT, ROOT
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
