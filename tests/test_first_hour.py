"""The first hour on a GPU: what `benchmarks/gpu.py` calls is there, and nothing stops it."""

import argparse
import json
import re
import runpy
import shlex
import sys

import gpu
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
