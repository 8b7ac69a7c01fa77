"""`repeat`: each seed trained once, however often it is called, and how far results vary."""

import json
import math
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import Forked, after_each_step, changed, logged, train_in_file, wait_for

from image_classifier.cli import main
from image_classifier.config import Config
from image_classifier.data import DATASETS
from image_classifier.data.datasets.shapes import shapes
from image_classifier.errors import EXIT_RESTART, UserError
from image_classifier.runtime import machine
from image_classifier.runtime.config_dict import flatten
from image_classifier.tools.runs import child_runs, many_runs
from image_classifier.tools.runs.child_runs import wait_until_free
from image_classifier.tools.runs.recipe import Recipe, take_recipe
from image_classifier.tools.statistics import statistics

TINY = "smoke --epochs 2 --optim.warmup-epochs 1 --data.limit 64 --data.batch-size 16"  # `tiny`


@pytest.fixture
def forked(monkeypatch):
    monkeypatch.setattr(many_runs, "start_run", Forked)


def repeat(folder, *words, count=2):
    own = ["--run.trackers", "--run.dir", str(folder)]
    return main(["repeat", str(count), *TINY.split(), *own, *words])


HOLD = """
import sys, time
from fcntl import LOCK_EX, lockf
lock = open(sys.argv[1], "a+")
lockf(lock, LOCK_EX)
print("held", flush=True)
time.sleep(1)
"""


def test_a_run_that_still_saves_as_its_command_was_killed_is_waited_for(tmp_path):
    assert wait_until_free(tmp_path, 60)
    words = [sys.executable, "-c", HOLD, str(tmp_path / ".lock")]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as saving:
        saving.stdout.readline()
        assert not wait_until_free(tmp_path, 0.1)
        assert saving.poll() is None
        assert wait_until_free(tmp_path, 60)
        assert saving.wait(10) == 0


def wait_for_signal(log, _):
    """After the third step of a run's first start, wait until SIGTERM is noted."""
    third, noted = Path(log.config.run.dir, "third-step"), []
    if log.step_done == 3 and not third.exists():
        note = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda *words: noted.append(note(*words)))
        third.touch()
        wait_for(lambda: noted)


def train_until_told(words, output):
    after_each_step(pytest.MonkeyPatch(), wait_for_signal)
    train_in_file(words, output)


def test_ctrl_c_saves_all_runs_and_the_same_command_resumes(tmp_path, monkeypatch, capfd):
    third, sent = tmp_path / "seed-0" / "third-step", []

    def interrupt(_):
        time.sleep(0.02)
        if third.exists() and not sent:
            sent.append(signal.raise_signal(signal.SIGINT))

    monkeypatch.setattr(many_runs, "start_run", partial(Forked, train=train_until_told))
    monkeypatch.setattr(many_runs, "time", SimpleNamespace(sleep=interrupt))
    assert repeat(tmp_path) == 130
    said = f"received SIGINT: 0 of 2 runs in {tmp_path} are done, the others saved; run the same"
    assert said in capfd.readouterr().err
    status = (third.parent / "status.json").read_text()
    assert json.loads(status)["state"] == "interrupted"
    monkeypatch.setattr(many_runs, "start_run", Forked)
    assert repeat(tmp_path, "--at-once", "2", "--run.log-every-steps", "1") == 0
    rows = [logged(tmp_path / f"seed-{seed}") for seed in range(2)]
    steps = [[row["step"] for row in run if "train/loss" in row] for run in rows]
    assert steps == [[*range(4, 9)], [*range(1, 9)]]


def test_a_second_command_in_the_folder_of_one_that_trains_is_refused(tmp_path, refusal):
    holder = "import sys; from {}.runtime.files import lock_file; file = open(sys.argv[1], 'w'); "
    holder += "lock_file(file, ''); print(1, file=file, flush=True); sys.stdin.read()"
    program = [sys.executable, "-c", holder.format(many_runs.__name__.partition(".")[0])]
    with subprocess.Popen([*program, tmp_path / ".lock"], stdin=subprocess.PIPE) as first:
        wait_for(lambda: (tmp_path / ".lock").exists() and (tmp_path / ".lock").read_text())
        line = refusal("repeat", 2, *TINY.split(), "--run.trackers", "--run.dir", tmp_path)
        first.stdin.close()
    assert f"'{tmp_path}' is in use by another run" in line
    assert {path.name for path in tmp_path.iterdir()} == {".lock"}


@pytest.mark.usefixtures("forked")
def test_seeds_that_are_done_are_kept_and_two_recipes_can_be_compared(
    tmp_path, trained_once, capsys
):
    a, b = tmp_path / "a", tmp_path / "b"
    shutil.copytree(trained_once, a / "seed-0")
    before = (a / "seed-0" / "metrics.jsonl").stat().st_mtime_ns
    assert repeat(a) == 0
    said = capsys.readouterr().out
    assert (a / "seed-0" / "metrics.jsonl").stat().st_mtime_ns == before
    assert said.count("done before") == 1
    assert f"to train: 1 of 2 runs, 1 at once; what they print is in {a}/*.txt" in said
    assert "step 8/8" in (a / "seed-1.txt").read_text()
    found = json.loads((a / "results.json").read_text())
    assert [run["seed"] for run in found["runs"]] == [0, 1]
    folders = [a / f"seed-{seed}" for seed in range(2)]
    last = [logged(folder)[-1]["val/top1"] for folder in folders]
    ends = [json.loads((folder / "status.json").read_text()) for folder in folders]
    top1 = [end["result"]["val/top1"] for end in ends]
    assert found["last_top1"]["mean"] == pytest.approx(sum(last) / 2)
    assert found["top1"]["mean"] == pytest.approx(sum(top1) / 2)
    mean, deviation, *ends = (
        100 * found["top1"][name] for name in ("mean", "deviation", "low", "high")
    )
    assert (
        f"top-1 of best.pt {mean:.2f}% ± {deviation:.2f} (standard deviation over 2 seeds), "
        "95% interval of the mean: {:.2f} .. {:.2f}\n".format(*ends)
        in said
    )
    shutil.copytree(a, b)
    for path in b.glob("*/config.json"):
        path.write_text(path.read_text().replace('"optim.lr": 0.02', '"optim.lr": 0.1'))
    assert main(["compare", str(a), str(b)]) == 0
    said = capsys.readouterr().out
    assert "B against A: optim.lr 0.02 -> 0.1" in said
    assert "2 seeds)" in said


@pytest.mark.usefixtures("forked")
def test_runs_of_other_images_or_weights_are_not_taken_for_these(
    tmp_path, trained_once, refusal, monkeypatch
):
    shutil.copytree(trained_once, tmp_path / "seed-0")
    assert repeat(tmp_path) == 0
    words = ["repeat", 2, *TINY.split(), "--run.trackers", "--run.dir", tmp_path]
    best = trained_once / "checkpoints" / "best.pt"
    said = refusal(*words, "--run.init-from", best)
    why = "was trained on other images or with another --run.init-from"
    assert f"'{tmp_path}/seed-0' {why}" in said

    def others(*split):
        found = shapes(*split)
        return replace(found, labels=found.labels.flip(0))

    def other_training(data, split):
        return others(data, split) if split == "train" else shapes(data, split)

    for now in (others, other_training):
        monkeypatch.setitem(DATASETS, "shapes", now)
        assert "was trained on other images" in refusal(*words)


def test_a_run_that_is_done_goes_on_for_options_that_act_on_its_result(tmp_path):
    run = Config().run
    recipe = Recipe("smoke", replace(Config(), run=replace(run, dir=str(tmp_path))), {}, 1)
    (tmp_path / "seed-0").mkdir()
    (tmp_path / "seed-0" / "config.json").write_text(json.dumps(flatten(recipe.config)))
    (tmp_path / "seed-0" / "status.json").write_text('{"state": "done"}')
    each = {"seed-0": {"seed": 0}}
    for more, is_done in (
        ({"log_every_steps": 7, "trackers": ("none",)}, True),
        ({"best_by": "loss"}, False),
        ({"patience": 3}, False),
    ):
        config = replace(recipe.config, run=replace(recipe.config.run, **more))
        assert many_runs.is_done(replace(recipe, config=config), "seed-0", each) == is_done
    exact = replace(recipe.config, precision="fp32")  # what `auto` became is that of a machine
    assert not many_runs.is_done(replace(recipe, config=exact), "seed-0", each)


@pytest.mark.parametrize("code", [1, 74, 75])
def test_of_a_run_that_is_not_done_the_reason_is_said_and_the_others_are_trained(
    code, tmp_path, monkeypatch, finished, capsys
):
    def start_run(_, output):
        output.parent.mkdir(exist_ok=True)
        bad = f"import sys; print('out of luck\\nfailed'); sys.exit({code})"
        program = bad if output.name == "seed-0.txt" else ""
        shutil.copytree(finished.run.dir, output.with_suffix(""))
        with output.open("w") as file:
            return subprocess.Popen([sys.executable, "-c", program], stdout=file)

    monkeypatch.setattr(many_runs, "start_run", start_run)
    is_saved, account = code == EXIT_RESTART, f"1 of 2 runs in {tmp_path}/runs are done, "
    ends = main(["repeat", "2", "smoke", "--run.dir", str(tmp_path / "runs")])
    assert ends == (75 if is_saved else 1)
    said = capsys.readouterr()
    how = "" if is_saved else f" failed (exit code {code})"
    assert f"seed-0{how}: out of luck\n" in said.out
    assert "seed-1: top-1 " in said.out
    if is_saved:
        assert f"--run.max-minutes is over: {account}the others saved; run the same" in said.err
    else:
        assert f"{account}seed-0 failed; run the same command to retry" in said.err
    assert not (tmp_path / "runs" / "results.json").exists()
    main(["repeat", "2", "smoke", "--run.dir", str(tmp_path / "others"), "--run.fresh"])
    assert "run the same command, without --run.fresh, to re" in capsys.readouterr().err


@pytest.mark.usefixtures("forked")
def test_what_no_run_can_have_is_refused_once(tmp_path, refusal):
    for word in ("shapes", "1", "2.5"):
        said = f"repeat {word}: a number from 2 on comes first: `repeat 5 shapes`"
        assert said in refusal("repeat", word, "5")
    assert "Missing from" in refusal("repeat")
    own = f"--data.root {tmp_path}/nope --data.name folder --run.dir {tmp_path}/runs".split()
    said = refusal("repeat", "3", "smoke", *own)
    assert said.startswith("error: seed-0: --data.root")
    assert not (tmp_path / "runs" / "seed-1.txt").exists()


def test_runs_share_gpus_and_cores(monkeypatch):
    def places(at_once=0, **knobs):
        return many_runs.devices(Recipe("smoke", changed(Config(), **knobs), {}, at_once))

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert places() == [{}]
    assert places(2) == [{"RUN_CORES": "1", "OMP_NUM_THREADS": "1"}] * 2
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(many_runs, "num_cores", lambda: 8)
    monkeypatch.setattr(machine, "num_cores", lambda: 8)
    assert places(3) == [{"RUN_CORES": "2", "OMP_NUM_THREADS": "2"}] * 3
    two = {"RUN_CORES": "4", "OMP_NUM_THREADS": "2"}  # threads of each process
    assert places(2, run__processes=2) == [two] * 2
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    gpus = [place["CUDA_VISIBLE_DEVICES"] for place in places()]
    assert gpus == ["0", "1", "2", "3"]
    assert [place["CUDA_VISIBLE_DEVICES"] for place in places(run__processes=2)] == ["0,1", "2,3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert [place["CUDA_VISIBLE_DEVICES"] for place in places(6)] == [*"456745"]


def test_the_interval_of_a_mean_is_students():
    found = statistics.mean_of([0.92, 0.94, 0.96], grain=0.001)
    reach = 4.302653 * 0.02 / math.sqrt(3)
    assert (found.mean, found.deviation) == pytest.approx((0.94, 0.02))
    assert (found.low, found.high) == pytest.approx((0.94 - reach, 0.94 + reach))
    same = statistics.mean_of([0.9, 0.9], grain=0.01)  # two that are equal by chance
    assert same.high - same.low > 0.1
    kappas = statistics.mean_of([-0.2, -0.1], grain=0.001, is_share=False)
    assert kappas.low < -0.2  # only a share of 1 ends at 0


def test_a_run_of_several_knows_nothing_of_the_ranks_of_others(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(child_runs.subprocess, "Popen", lambda _, **how: started.append(how))
    for name in ("RANK", "WORLD_SIZE", "RUN_BEGAN", "RUN_CORES", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    child_runs.start_run(["smoke"], tmp_path / "out.txt", RUN_CORES="3")
    environment = started[0]["env"]
    assert [name for name in environment if name.startswith(child_runs.FOREIGN)] == ["RUN_CORES"]
    assert environment["RUN_CORES"] == "3"


def test_a_run_of_several_processes_is_started_and_ends(tmp_path):
    words = [*TINY.split(), "--run.trackers", "--run.processes", "2", "--run.dir", str(tmp_path)]
    output = tmp_path / "out.txt"
    assert child_runs.start_run(words, output).wait(120) == 0, output.read_text()
    assert json.loads((tmp_path / "environment.json").read_text())["processes"] == 2


def test_seeds_are_those_from_the_given_one_on(monkeypatch):
    train_all = Mock(side_effect=UserError("enough"))
    monkeypatch.setattr(many_runs, "train_all", train_all)
    with pytest.raises(UserError, match="enough"):
        many_runs.repeat(Recipe("smoke", replace(Config(), seed=5), {}, 1), 3)
    _, each = train_all.call_args.args
    assert each == {f"seed-{seed}": {"seed": seed} for seed in (5, 6, 7)}


def test_as_many_runs_train_at_once_as_are_asked_for():
    count, recipe = take_recipe(["4", "smoke", "--at-once", "3"], "repeat", "", "shapes")
    assert (count, len(many_runs.devices(recipe))) == (4, 3)
