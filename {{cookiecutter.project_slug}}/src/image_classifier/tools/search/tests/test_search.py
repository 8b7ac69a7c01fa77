# ruff: noqa: E402 - nothing here can be imported without Ray
"""The search: what it proposes, who goes on, that nothing is trained twice, what it writes."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from conftest import write_trial

tune = pytest.importorskip("ray.tune")
pytest.importorskip("optuna")
for tool in ("ray_train", "runs"):
    pytest.importorskip(f"image_classifier.tools.{tool}")

from image_classifier.config import OPTIMIZERS, Config
from image_classifier.errors import EXIT_RESTART, UserError
from image_classifier.extensions import finding
from image_classifier.runtime.platform import install_command
from image_classifier.runtime.signals import StoppedError
from image_classifier.tools.search import (
    command,
    engines,
    job,
    results,
    search,
    spaces,
    trial,
)

PACKAGE = engines.__name__.partition(".")[0]
child_runs = pytest.importorskip(f"{PACKAGE}.tools.runs.child_runs")
many_runs = pytest.importorskip(f"{PACKAGE}.tools.runs.many_runs")

SPACE = {
    "optim.lr": tune.loguniform(0.01, 1.0),
    "optim.momentum": tune.quniform(0.8, 0.9, 0.05),
    "model.name": tune.choice(["resnet9", "resnet18"]),
}


def proposals(kind, space, recorded=(), trials=12, seed=0):
    """What an engine proposes, without any results."""
    found = engines.open_space(space, Config())
    engine = engines.build_engine(kind, found, list(recorded), trials, seed)
    found = [engine.suggest(str(n)) for n in range(trials)]
    return [{knob: engines.tidy(v) for knob, v in one.items()} for one in found if one]


@pytest.mark.parametrize("kind", ["random", "tpe", "grid"])
def test_a_search_that_goes_on_proposes_the_same_again_and_then_other_configs(kind):
    first = proposals(kind, SPACE)
    again = proposals(kind, SPACE, first[:5])
    assert again[:5] == first[:5]
    assert len({json.dumps(one, sort_keys=True) for one in again}) == len(again)
    assert len(again) == (8 if kind == "grid" else 12)
    assert all(0.01 <= one["optim.lr"] <= 1 for one in again)


def test_a_grid_is_even_in_each_distribution_and_shuffled_by_the_seed():
    def values(knob, domain, trials):
        found = engines.open_space({knob: domain}, Config())
        return [one[knob] for one in engines.grid(found, trials, seed=0)]

    assert {one["optim.lr"] for one in proposals("grid", SPACE, trials=13)} == {0.01, 1.0}
    lrs = values("optim.lr", SPACE["optim.lr"], 5)
    assert sorted(lrs) == [0.01, 0.0316228, 0.1, 0.316228, 1.0] != lrs
    assert sorted(values("optim.accumulate", tune.randint(2, 6), 9)) == [2, 3, 4, 5]
    smoothing = values("optim.label_smoothing", tune.quniform(0, 0.2, 0.1), 9)
    assert sorted(smoothing) == [0, 0.1, 0.2]


@pytest.mark.parametrize("kind", ["random", "tpe", "grid"])
def test_the_same_seed_proposes_the_same_and_another_one_other_configs(kind):
    first = proposals(kind, SPACE)
    assert proposals(kind, SPACE) == first
    assert proposals(kind, SPACE, seed=1) != first


@pytest.mark.parametrize("kind", ["tpe", "random"])
def test_a_function_as_a_space_draws_values_that_depend_on_others(kind):
    found = proposals(kind, spaces.optimizers(Config()))
    assert {one["optim.name"] for one in found} == {*OPTIMIZERS}
    assert all(one["optim.lr"] <= 0.01 for one in found if one["optim.name"] == "adamw")
    with pytest.raises(UserError, match="set --search tpe or random"):
        proposals("grid", spaces.optimizers(Config()))


@pytest.mark.parametrize(
    ("knob", "domain", "expected"),
    [
        ("optim.label_smoothing", tune.uniform(0, 1), "label-smoothing 1 is not in 0 .. 0.99"),
        ("optim.rate", tune.uniform(0, 1), "there is no --optim.rate"),
        ("optim.name", tune.choice(["sgd", "lion"]), "lion"),
        ("run.dir", tune.choice(["a"]), "cannot change run.dir"),
        ("optim.lr", 0.1, "is no distribution with bounds"),
        ("optim.lr", tune.randn(0, 1), "is no distribution with bounds"),
    ],
)
def test_a_space_that_no_run_can_have_is_refused_before_anything_starts(knob, domain, expected):
    with pytest.raises(UserError, match=expected):
        engines.open_space({knob: domain}, Config())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--space other", "no search space 'other'; there are: default"),
        ("--min-epochs 9", "is more than --epochs 3"),
        ("--gpus 64", "there are"),
        ("--search grid --trials 7", "a grid over"),
        ("--trials 0", "is not in 1"),
        ("--cpus 4096", "--cpus 4096 of a trial: there are"),
        ("--epochs 0 --run.init-from pretrained", "trains no step that a search could judge"),
        ("--data.name folder --data.root nowhere", "nowhere"),
    ],
)
def test_what_cannot_be_searched_is_refused_in_a_line(words, expected, refusal, tmp_path):
    assert expected in refusal("search", "smoke", "--run.dir", tmp_path / "s", *words.split())
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("kind", ["tpe", "random", "grid"])
def test_a_folder_with_a_search_for_something_else_is_refused(kind, refusal, tmp_path):
    about = {"preset": "smoke", "changed": {}, "space": "optimizers", "knobs": {}}
    (tmp_path / "search.json").write_text(json.dumps(about))
    write_trial(tmp_path, 0, [0.5], **{"optim.name": "sgd", "optim.lr": 0.1})
    words = ["--space", "lr", "--search", kind, "--run.dir", tmp_path]
    assert "holds a search with another preset, space or config" in refusal(
        "search", "smoke", *words
    )
    assert json.loads((tmp_path / "search.json").read_text()) == about


def test_a_folder_with_a_search_on_other_images_is_refused(tmp_path):
    about = {"preset": "smoke", "images": {"val": ("a", {"sizes": "1"})}}
    (tmp_path / "search.json").write_text(json.dumps(about))
    write_trial(tmp_path, 0, [0.5], **{"optim.lr": 0.1})
    for same in (("a", {"sizes": "1"}), ("a prepared", {})):
        assert search.earlier(tmp_path, about | {"images": {"val": same}}) == [{"optim.lr": 0.1}]
    for other in (("b", {"sizes": "1"}), ("a", {"sizes": "2"})):
        with pytest.raises(UserError, match="or other images"):
            search.earlier(tmp_path, about | {"images": {"val": other}})
    one = about | {"images": {"train": ("a", {}), "val": ("b", {})}}
    (tmp_path / "search.json").write_text(json.dumps(one))
    with pytest.raises(UserError, match="or other images"):
        search.earlier(tmp_path, one | {"images": {"train": ("c", {}), "val": ("b", {})}})


def test_a_fresh_search_deletes_its_trials_and_no_other_run(tmp_path):
    write_trial(tmp_path, 0, [0.5], **{"optim.lr": 0.1})
    (tmp_path / "2026-01-05-baseline").mkdir()
    (tmp_path / "confirm" / "A" / "seed-0").mkdir(parents=True)
    search.clear(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2026-01-05-baseline", "confirm"]
    (tmp_path / "search.json").touch()  # then the runs that confirm it are its own
    search.clear(tmp_path)
    assert not (tmp_path / "confirm").exists()


def test_the_command_that_is_printed_has_the_values_that_were_found(tmp_path, capsys):
    write_trial(tmp_path, 0, [0.5], **{"optim.lr": 0.25})
    run = replace(Config().run, dir=str(tmp_path))
    options = command.SearchOptions(run=run)
    search.report(job.plan("smoke", options, {"optim.lr": 0.1, "seed": 7}), {})
    found = json.loads((tmp_path / "results.json").read_text())["command"]
    assert found == "python train.py smoke --optim.lr 0.25 --seed 7"
    assert f"best: trial 000: {found}\n" in capsys.readouterr().out


def test_fewer_trials_than_cores_share_all_of_them(monkeypatch):
    monkeypatch.setattr(job, "num_cores", lambda: 8)
    plan = planned(trials=2, gpus=0)
    assert (plan.recipe.at_once, plan.options.cpus) == (2, 4)


def test_a_trial_has_a_part_of_a_gpu_or_whole_ones(monkeypatch):
    monkeypatch.setattr(job.torch.cuda, "device_count", lambda: 4)
    assert [planned(gpus=count).options.gpus for count in (0.5, 2)] == [0.5, 2]
    with pytest.raises(UserError, match=r"--gpus 1\.5 of a trial: there are 4; a part, or"):
        planned(gpus=1.5)


def test_a_trial_of_several_processes_has_a_gpu_and_equal_cores_for_each(tmp_path, monkeypatch):
    monkeypatch.setattr(job.torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(job, "num_cores", lambda: 32)
    started = []
    monkeypatch.setattr(trial, "start_run", lambda *_, **variables: started.append(variables))
    two = replace(Config().run, processes=2)
    for plan in (planned(run=two), planned(gpus=2)):
        assert (plan.options.gpus, plan.recipe.at_once) == (2, 4)
        shares = [place["CUDA_VISIBLE_DEVICES"] for place in many_runs.devices(plan.recipe)]
        assert shares == ["0,1", "2,3", "4,5", "6,7"]  # of the runs that confirm the best
        begun = object.__new__(trial.RunTrial)
        begun.setup({"folder": str(tmp_path), "knobs": {}, "is_stopped": False}, plan)
        begun.start()
    assert started == [{"RUN_CORES": "8", "OMP_NUM_THREADS": "4"}] * 2
    with pytest.raises(UserError, match=r"--gpus 1 .* a part, or one for each process"):
        planned(run=two, gpus=1)


def test_a_trial_without_gpus_is_on_the_cpu_of_a_machine_that_has_some(monkeypatch):
    monkeypatch.setattr(job.torch.cuda, "device_count", lambda: 8)
    plan = planned(gpus=0)
    assert "--compute.device cpu" in " ".join(plan.recipe.words("000", {}))
    assert not any("CUDA_VISIBLE_DEVICES" in place for place in many_runs.devices(plan.recipe))
    with pytest.raises(UserError, match="--gpus 0 of a trial: there are 8"):
        planned(gpus=0, compute=replace(Config().compute, device="cuda"))


def test_what_is_free_to_change_does_not_make_another_search(tmp_path, monkeypatch):
    for name in ("run_trials", "report"):
        monkeypatch.setattr(search, name, Mock())
    monkeypatch.setattr(search, "images_of", lambda *_: ("a", {}))
    options = command.SearchOptions(run=replace(Config().run, dir=str(tmp_path)))
    search.search("smoke", options, {"optim.lr": 0.3, "data.workers": 0})
    assert json.loads((tmp_path / "search.json").read_text())["changed"] == {"optim.lr": 0.3}


def test_a_trial_is_evaluated_as_often_as_its_first_rung_asks(tmp_path, monkeypatch):
    words = []
    monkeypatch.setattr(trial, "start_run", lambda given, *_, **__: words.extend(given))
    often, rarely = planned(min_epochs=0.5), planned(scheduler="none")
    patient = planned(min_epochs=0.5, run=replace(Config().run, patience=3))
    assert [plan.every for plan in (often, rarely, patient)] == [0.5, 1, 1]
    begun = object.__new__(trial.RunTrial)
    begun.setup({"folder": str(tmp_path), "knobs": {}, "is_stopped": False}, often)
    begun.start()
    assert " --run.evaluate-every-epochs 0.5 " in f" {' '.join(words)} "


def test_only_what_is_done_has_reached_the_last_rung():
    told = SimpleNamespace(told=9, job=planned())
    rows = [{"step": 99, "epoch": 8.8, "val/top1": 0.5}]  # evaluations are rounded to steps
    for is_done in (False, True):
        planned_epoch = trial.RunTrial.report(told, rows, is_done)["planned_epoch"]
        assert (planned_epoch >= 9) == is_done


def test_without_its_libraries_the_command_says_what_to_install(refusal, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    for name in ("search", "engines", "results"):
        monkeypatch.delitem(sys.modules, f"{PACKAGE}.tools.search.{name}")
    said = refusal("search", "smoke")
    assert said.endswith(f"(optuna): {install_command('ray[tune]', 'optuna')}\n")


def test_without_the_tool_that_starts_runs_the_command_says_so(refusal, monkeypatch):
    monkeypatch.setattr(finding, "find_tool", lambda *_: None)
    assert refusal("search", "smoke") == (
        "error: search needs a tool that is not here: pretuned add runs\n"
    )


def trained_epochs(scheduler, scores):
    """How long Ray's scheduler lets trials train, two at once: `scores` of each, all constant."""
    scheduler.set_search_properties(**engines.GOAL)
    trained, running = [0] * len(scores), []
    while running or 0 in trained:
        while 0 in trained and len(running) < 2:
            number = trained.index(0)
            trained[number] = 1e-9
            running.append(number)
            scheduler.on_trial_add(None, SimpleNamespace(trial_id=number))
        for number in [*running]:
            trained[number] += 1
            result = {"planned_epoch": trained[number], "score": scores[number]}
            ray_trial = SimpleNamespace(trial_id=number)
            if scheduler.on_trial_result(None, ray_trial, result) == "STOP":
                running.remove(number)
    return [round(one) for one in trained]


def planned(**options):
    """A search for 9 epochs, whose rungs are at 1 and 3 of them."""
    return job.plan("smoke", command.SearchOptions(epochs=9.0, **options), {})


def test_asha_trains_the_best_to_the_end_and_ends_others_at_rungs():
    scheduler = job.build_scheduler(planned())
    assert trained_epochs(scheduler, [9, 8, 7, 6, 10, 5]) == [9, 1, 1, 1, 9, 1]
    scheduler = job.build_scheduler(planned(scheduler="none"))
    assert scheduler.on_trial_result(None, None, {"planned_epoch": 1, "score": 0}) == "CONTINUE"


def test_hyperband_ends_bad_trials_in_brackets_that_are_the_same_for_the_same_seed():
    first, again = (
        trained_epochs(job.build_scheduler(planned(scheduler="hyperband")), range(40, 0, -1))
        for _ in range(2)
    )
    assert first == again
    assert {*first} == {1, 3, 9}
    other = job.build_scheduler(planned(scheduler="hyperband", seed=1))
    assert trained_epochs(other, range(40, 0, -1)) != first


def test_rungs_are_as_far_from_one_another_as_is_asked_for():
    scheduler = job.build_scheduler(planned(min_epochs=1.0, reduction=2))
    ends = {*trained_epochs(scheduler, [5, 3, 8, 1, 7, 2, 9, 4, 6, 10, 0])}
    assert {1, 2, 9} <= ends <= {1, 2, 4, 8, 9}


@pytest.mark.parametrize("space", [spaces.default, spaces.lr, spaces.finetune])
def test_learning_rates_are_searched_on_both_sides_of_the_presets(space):
    config = Config()
    config = replace(config, optim=replace(config.optim, lr=0.32, weight_decay=0.001))
    found = engines.open_space(space(config), config)
    rates = found["optim.lr"]
    assert (rates.low, rates.high, rates.log) == (pytest.approx(0.02), pytest.approx(5.12), True)
    if space is spaces.default:
        decays = found["optim.weight_decay"]
        assert (decays.low, decays.high) == pytest.approx((0.0001, 0.01))


def test_tpe_learns_from_results_and_random_search_does_not():
    distances = {}
    for kind in ("tpe", "random"):
        space = engines.open_space({"optim.lr": SPACE["optim.lr"]}, Config())
        engine = engines.build_engine(kind, space, [], 40, seed=0)
        found = []
        for number in map(str, range(40)):
            found.append(abs(np.log10(engine.suggest(number)["optim.lr"] / 0.1)))
            engine.on_trial_complete(number, {"score": -found[-1]})
        distances[kind] = np.mean(found[20:])
    assert distances["tpe"] < 0.5 * distances["random"]


def test_the_table_has_the_best_first_and_what_all_took(tmp_path):
    for number, lr in enumerate((0.01, 0.1, 1.0, 0.02, 0.2)):
        write_trial(tmp_path, number, [0.3, 0.5 + lr / 10], **{"optim.lr": lr})
    write_trial(tmp_path, 5, [0.9], "stopped", **{"optim.lr": 0.5})
    trials = results.read_trials(tmp_path, "top1")
    best = results.best_of(trials)
    assert (best.number, best.state, trials[5].state) == (2, "done", "stopped")
    lines = results.table_of(trials, 2).splitlines()
    firsts = [line.split()[0] for line in lines[:7]]
    assert firsts == ["trial", "002", "004", "001", "003", "000", "005"]
    assert lines[7] == "110 training steps, 92% of 120 for all trials in full"


def test_a_trial_whose_loss_is_not_finite_is_in_the_table_too(tmp_path):
    for number in range(2):
        write_trial(tmp_path, number, [0.5 - number / 4], **{"optim.lr": 1.0})
    rows = tmp_path / "001/metrics.jsonl"
    rows.write_text(rows.read_text().replace('"val/loss"', '"val/other"'))  # a run leaves it out
    lines = results.table_of(results.read_trials(tmp_path, "top1"), 1).splitlines()
    assert lines[2].split() == ["001", "done", "1.00", "25.00%", "nan", "1"]


def test_the_best_config_is_compared_with_the_preset_over_the_same_fresh_seeds(
    tmp_path, monkeypatch
):
    trained = []
    compare = Mock()
    monkeypatch.setattr(search, "train_all", lambda recipe, each: trained.append((recipe, each)))
    monkeypatch.setattr(search, "compare", compare)
    options = {"confirm": 2, "seed": 7, "run": replace(Config().run, dir=str(tmp_path))}
    best = SimpleNamespace(number=3, knobs={"optim.lr": 0.3})
    search.confirm(planned(**options), best)
    folders = [str(tmp_path / "confirm" / name) for name in ("preset", "trial-003")]
    assert [str(recipe.folder) for recipe, _ in trained] == folders
    assert [each for _, each in trained] == [
        {"seed-8": own | {"seed": 8}, "seed-9": own | {"seed": 9}} for own in ({}, best.knobs)
    ]
    compare.assert_called_once_with(folders)


def run_trial(folder, metric="top1", is_stopped=False):
    """A trial of Ray's for the run in a folder, of three epochs, evaluated after each."""
    reported = object.__new__(trial.RunTrial)
    run = replace(Config().run, dir=str(folder.parent))
    options = command.SearchOptions(epochs=3.0, scheduler="none", run=run)
    given = replace(job.plan("smoke", options, {}), metric=metric)
    reported.setup({"folder": str(folder), "knobs": {}, "is_stopped": is_stopped}, given)
    return reported


@pytest.mark.parametrize("best_by", ["top1", "loss"])
def test_a_trial_is_as_good_as_the_weights_in_its_best_pt(best_by, tmp_path):
    write_trial(tmp_path, 0, [0.5, 0.9, 0.2])
    write_trial(tmp_path, 1, [0.6, 0.7, 0.8])
    trials = results.read_trials(tmp_path, best_by)
    assert results.best_of(trials).number == 0
    assert results.table_of(trials, 3).splitlines()[1].split() == [
        "000",
        "done",
        "3.00",
        *(("90.00%", "0.1000") if best_by == "top1" else ("0.1000", "0.1000")),
    ]
    reported = run_trial(tmp_path / "000", best_by)
    results_of_steps = [reported.step() for _ in range(3)]
    assert [one["done"] for one in results_of_steps] == [False, False, True]
    score = results_of_steps[-1]["score"]
    assert score == pytest.approx(0.9 if best_by == "top1" else -0.1)


def test_a_trial_is_not_done_before_its_process_has_ended(tmp_path):
    write_trial(tmp_path, 0, [0.5])
    reported = run_trial(tmp_path / "000")
    reported.process = SimpleNamespace(poll=Mock(side_effect=[None, 0]))
    assert [reported.step()["done"] for _ in range(2)] == [False, True]


def test_what_weights_reach_before_training_is_no_evaluation_of_a_trial(tmp_path):
    write_trial(tmp_path, 0, [0.5, 0.9])
    path = tmp_path / "000/metrics.jsonl"
    begun = {"step": 0, "epoch": 0.0, "val/top1": 0.95, "val/loss": 0.1}
    path.write_text(json.dumps(begun) + "\n" + path.read_text())
    (found,) = results.read_trials(tmp_path, "top1")
    assert [row["val/top1"] for row in found.rows] == [0.5, 0.9]
    assert results.table_of([found], 2)
    assert run_trial(tmp_path / "000").step()["epoch"] == 1


def test_a_trial_that_was_stopped_is_not_trained_on(tmp_path, monkeypatch):
    monkeypatch.setattr(trial, "start_run", Mock(side_effect=AssertionError))
    write_trial(tmp_path, 0, [0.5, 0.9], "stopped", lr=1)
    run = replace(Config().run, dir=str(tmp_path))
    engine = Mock()
    engine.suggest.return_value = {"lr": 1}
    for scheduler in ("asha", "none"):
        proposals = trial.Proposals(engine, planned(run=run, scheduler=scheduler))
        assert proposals.suggest("a")["is_stopped"] is (scheduler == "asha")
        if scheduler == "asha":
            stopped = run_trial(tmp_path / "000", is_stopped=True)
            assert [stopped.step()["done"] for _ in range(2)] == [False, True]


def test_what_lies_in_a_folder_with_another_record_or_none_is_not_taken_for_a_trial(tmp_path):
    write_trial(tmp_path, 0, [0.5], lr=1)
    write_trial(tmp_path, 1, [0.9], "stopped", lr=2)
    write_trial(tmp_path, 2, [0.9])
    (tmp_path / "002/trial.json").unlink()  # as a run that was called so
    engine = Mock()
    engine.suggest.return_value = {"lr": 1}
    proposals = trial.Proposals(engine, planned(run=replace(Config().run, dir=str(tmp_path))))
    assert [proposals.suggest(name)["is_stopped"] for name in "ab"] == [False, False]
    with pytest.raises(UserError, match=r"002' is no trial's: move it, or take another --run\.dir"):
        proposals.suggest("c")
    found = results.read_trials(tmp_path, "top1")
    assert [(one.state, len(one.rows)) for one in found] == [("done", 1), ("failed", 0)]
    assert (tmp_path / "002/metrics.jsonl").exists()


def test_a_run_that_is_at_work_keeps_its_folder(tmp_path, monkeypatch):
    write_trial(tmp_path, 0, [0.5], lr=1)
    monkeypatch.setattr(trial, "wait_until_free", lambda *_: False)
    with pytest.raises(UserError, match="000' is in use by a run of an earlier search"):
        search.clear(tmp_path)
    assert results.read_trials(tmp_path, "top1")[0].state == "done"


def test_a_trial_that_is_ended_early_is_recorded_as_stopped_and_one_that_is_done_is_not(tmp_path):
    engine = Mock()
    engine.suggest.return_value = {"lr": 1}
    run = replace(Config().run, dir=str(tmp_path))
    proposals = trial.Proposals(engine, planned(run=run))
    result = {"evaluations": 1, "epoch": 1.0, "score": 0.5}
    for name, is_done in (("a", True), ("b", False)):
        proposals.suggest(name)
        proposals.on_trial_complete(name, result | {"is_run_done": is_done})
    records = (json.loads((tmp_path / f"00{n}" / "trial.json").read_text()) for n in range(2))
    assert [record.get("end") for record in records] == [None, "stopped"]


def test_a_trial_at_its_time_limit_is_saved_and_ends_the_search_with_start_me_again(
    tmp_path, monkeypatch
):
    def start_run(_, output, **__):
        output.write_text("--run.max-minutes is over: saved\n")
        return SimpleNamespace(poll=lambda: EXIT_RESTART, returncode=EXIT_RESTART)

    monkeypatch.setattr(trial, "start_run", start_run)
    for name in ("start_ray", "ray", "build_scheduler"):
        monkeypatch.setattr(search, name, Mock())
    monkeypatch.setattr(search.tune, "Tuner", Mock())
    write_trial(tmp_path, 0, [], "stopped")
    write_trial(tmp_path, 1, [0.5])
    limited = run_trial(tmp_path / "000")
    with pytest.raises(RuntimeError, match="is over: saved"):
        limited.step()
    run = replace(Config().run, dir=str(tmp_path))
    with pytest.raises(StoppedError, match="is over: 1 of 2 trials in") as ended:
        search.run_trials(planned(run=run, trials=2), None)
    assert ended.value.code == EXIT_RESTART
    assert results.read_trials(tmp_path, "top1")[0].state == "saved"


PROGRAM = """
import sys
from ray import tune
from {package}.cli import main
from {package}.tools.search.spaces import SPACES
SPACES["mine"] = lambda config: {{
    "model.name": tune.choice(["resnet9_gn", "resnet9", "resnet9_none"])
}}
sys.exit(main(["search", *sys.argv[1:]]))
"""


def start_search(folder, *words):
    """Start a search over three models, one of which is unknown."""
    command = "smoke --space mine --search grid --trials 3 --epochs 2 --min-epochs 1"
    command += " --optim.warmup-epochs 0 --data.limit 96 --run.trackers"
    words = [*command.split(), "--run.dir", str(folder), *words]
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(package=PACKAGE), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_killed_search_goes_on_trains_nothing_twice_and_outlives_failed_trials(tmp_path):
    folder = tmp_path / "s"
    killed = start_search(folder)
    wait_long(lambda: any(trial.evaluations(path, "top1") for path in folder.glob("0*")))
    killed.kill()
    killed.communicate()
    for path in folder.glob("0*"):
        child_runs.wait_until_free(path, 200)
    begun = results.recorded_knobs(folder)
    said, _ = start_search(folder).communicate(timeout=300)
    found = json.loads((folder / "results.json").read_text())
    states = sorted(one["state"] for one in found["trials"])
    assert states in (["done", "done", "failed"], ["done", "failed", "stopped"])  # they are short
    failures = [one["failed"] for one in found["trials"] if one["failed"]]
    assert all("exit code 2: error: " in line and "resnet9_none" in line for line in failures)
    assert f"best: trial {found['best']:03}: python train.py smoke --epochs 2" in said
    assert "Ray ended it" not in said
    for one in found["trials"]:
        place = folder / f"{one['number']:03}"
        output = (place / "output.log").read_text()
        assert output.count("  validation: ") == len(one["rows"])
        assert output.count("from step 0 of") == bool(one["rows"])
    assert results.recorded_knobs(folder)[: len(begun)] == begun != []
    assert not (folder / "ray").exists()
    token = Path.home() / ".ray" / "auth_token"
    written = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    assert not token.exists() or not any(token.read_bytes() in text for text in written)


def wait_long(condition):
    """Wait until `condition()`; Ray takes its time to start."""
    end = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
