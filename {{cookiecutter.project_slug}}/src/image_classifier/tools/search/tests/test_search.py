# ruff: noqa: E402 - nothing here can be imported without Ray
"""The search: what it proposes, who goes on, that nothing is trained twice, what it writes."""

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from conftest import HOSTILE, Shown

tune = pytest.importorskip("ray.tune")
pytest.importorskip("optuna")
for tool in ("ray_train", "report", "runs"):
    pytest.importorskip(f"image_classifier.tools.{tool}")

from image_classifier.config import Config
from image_classifier.errors import EXIT_RESTART, UserError
from image_classifier.extensions import finding
from image_classifier.runtime.platform import install_command
from image_classifier.runtime.signals import StoppedError
from image_classifier.tools.search import (
    command,
    engines,
    halving,
    job,
    overview,
    results,
    search,
    spaces,
    trial,
)

PACKAGE = engines.__name__.partition(".")[0]

SPACE = {
    "optim.lr": tune.loguniform(0.01, 1.0),
    "optim.momentum": tune.quniform(0.8, 0.9, 0.05),
    "model.name": tune.choice(["resnet9", "resnet18"]),
}


def proposals(kind, space, recorded=(), trials=12):
    """What an engine proposes, without any results."""
    engine = engines.build_engine(kind, space, list(recorded), trials, seed=0)
    found = [engine.suggest(str(n)) for n in range(trials)]
    return [
        {knob: engines.tidy(v) for knob, v in one.items()} for one in found if one != "FINISHED"
    ]


@pytest.mark.parametrize("kind", ["random", "tpe", "grid"])
def test_a_search_that_goes_on_proposes_the_same_again_and_then_other_configs(kind):
    first = proposals(kind, SPACE)
    again = proposals(kind, SPACE, first[:5])
    assert again[:5] == first[:5]
    assert len({json.dumps(one, sort_keys=True) for one in again}) == len(again)
    assert len(again) == (8 if kind == "grid" else 12)
    assert all(0.01 <= one["optim.lr"] <= 1 for one in again)


def test_a_grid_is_even_in_each_distribution_and_shuffled_by_the_seed():
    values = {one["optim.lr"] for one in engines.grid(SPACE, 13, seed=0)}
    assert values == {0.01, 1.0}
    lrs = [one["optim.lr"] for one in engines.grid({"optim.lr": SPACE["optim.lr"]}, 5, seed=0)]
    assert sorted(lrs) == [0.01, 0.0316228, 0.1, 0.316228, 1.0] != lrs
    assert engines.evenly(tune.randint(2, 6), 9) == [2, 3, 4, 5]
    assert engines.evenly(tune.quniform(0, 0.2, 0.1), 9) == [0, 0.1, 0.2]


def test_values_that_depend_on_others_are_drawn_by_the_searches_that_can():
    doubled = tune.sample_from(lambda spec: 2 * spec.config["optim.lr"])
    dependent = SPACE | {"optim.weight_decay": doubled}
    for one in proposals("random", dependent):
        assert one["optim.weight_decay"] == pytest.approx(2 * one["optim.lr"], rel=1e-5)
    for kind in ("tpe", "random"):
        found = proposals(kind, spaces.optimizers(Config()))
        assert {one["optim.name"] for one in found} == {"sgd", "adamw", "muon"}
        assert all(one["optim.lr"] <= 0.01 for one in found if one["optim.name"] == "adamw")
    for kind, space in (("grid", dependent), ("tpe", dependent), ("grid", spaces.optimizers(None))):
        with pytest.raises(UserError, match="set --search"):
            proposals(kind, space)


@pytest.mark.parametrize(
    ("knob", "domain", "expected"),
    [
        ("optim.label_smoothing", tune.uniform(0, 1), "label-smoothing 1 is not in 0 .. 0.99"),
        ("optim.rate", tune.uniform(0, 1), "there is no --optim.rate"),
        ("optim.name", tune.choice(["sgd", "lion"]), "lion"),
        ("run.dir", tune.choice(["a"]), "cannot change run.dir"),
        ("optim.lr", 0.1, "is no distribution"),
    ],
)
def test_a_space_that_no_run_can_have_is_refused_before_anything_starts(knob, domain, expected):
    with pytest.raises(UserError, match=expected):
        engines.check_space({knob: domain}, Config())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--space other", "no search space 'other'; there are: default"),
        ("--min-epochs 9", "is more than --epochs 3"),
        ("--gpus 64", "there are"),
        ("--search grid --trials 7", "a grid over"),
        ("--trials 0", "is not in 1"),
    ],
)
def test_what_cannot_be_searched_is_refused_in_a_line(words, expected, refusal, tmp_path):
    assert expected in refusal("search", "smoke", "--run.dir", tmp_path / "s", *words.split())
    assert not (tmp_path / "s").exists()


def test_without_its_libraries_the_command_says_what_to_install(refusal, monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda _: None)
    assert f"{install_command('ray[tune]', 'optuna')}\n" in refusal("search", "smoke")


def test_without_the_tool_that_starts_runs_the_command_says_so(refusal, monkeypatch):
    monkeypatch.setattr(finding, "find_tool", lambda *_: None)
    assert refusal("search", "smoke") == (
        "error: search needs a tool that is not here: pretuned add runs\n"
    )


class FakeController:
    """Trials in place of Ray's, that run in turns and reach what `curve(n, units)` says."""

    def __init__(self, scheduler, count, curve, workers=2):
        self.scheduler, self.curve = scheduler, curve
        self.trials, self.count, self.workers = [], count, workers
        self.searcher = Mock()
        self.search_alg = SimpleNamespace(searcher=self.searcher, is_finished=self.are_all_proposed)

    def are_all_proposed(self):
        """Whether the engine has no more."""
        return len(self.trials) == self.count

    def get_trials(self):
        """All of them."""
        return self.trials

    def stop_trial(self, stopped):
        """End a paused trial."""
        stopped.status = "TERMINATED"
        self.scheduler.on_trial_remove(self, stopped)

    def run(self, units):
        """Run all trials for `units` at most; how many units each was trained."""
        while True:
            running = [t for t in self.trials if t.status == "RUNNING"]
            if len(running) < self.workers and not self.are_all_proposed():
                self.trials.append(FakeTrial(len(self.trials)))
                self.scheduler.on_trial_add(self, self.trials[-1])
            chosen = self.scheduler.choose_trial_to_run(self)
            if chosen and len(running) < self.workers:
                chosen.status = "RUNNING"
                running.append(chosen)
            if not running:
                return [t.units for t in self.trials]
            for one in running:
                one.units += 1
                score = self.curve(one.number, one.units)
                result = {"units": one.units, "score": score}
                decision = self.scheduler.on_trial_result(self, one, result)
                if one.units == units:
                    one.status = "TERMINATED"
                    self.scheduler.on_trial_complete(self, one, result)
                elif decision == "STOP":
                    one.status = "TERMINATED"
                elif decision == "PAUSE":
                    one.status = "PAUSED"


class FakeTrial:
    """As much of a trial of Ray's as a scheduler asks for."""

    def __init__(self, number):
        self.number, self.trial_id, self.units = number, str(number), 0
        self.status, self.is_saving = "PENDING", False

    def is_finished(self):
        """Whether it has ended."""
        return self.status == "TERMINATED"


@pytest.mark.parametrize("order", [1, -1])
def test_asha_trains_a_known_share_whatever_the_order_and_the_best_to_the_end(order):
    scheduler = halving.PausingASHA(16.0, 4)
    units = FakeController(scheduler, 12, lambda n, units: order * n + units).run(16)
    assert sum(units) == 12 * 1 + 3 * 3 + 1 * 12
    assert units[11 if order == 1 else 0] == 16
    assert sorted(units)[:9] == [1] * 9


def test_hyperband_ends_bad_trials_though_few_run_at_once():
    options = command.SearchOptions(scheduler="hyperband", reduction=3)
    scheduler = job.build_scheduler(options, 9.0)
    scheduler.set_search_properties(**engines.GOAL)
    units = FakeController(scheduler, 14, lambda n, units: n + units).run(9)
    assert sorted(units[:9]) == [1] * 6 + [3] * 2 + [9]
    assert sorted(units[9:]) == [3] * 3 + [9] * 2


def run_folder(folder, number, top1s, state="done", best_by="auto", **knobs):
    """The folder of a trial; its loss is 1 - top-1."""
    place = results.trial_folder(folder, number)
    place.mkdir(parents=True)
    (place / "trial.json").write_text(json.dumps({"knobs": knobs}))
    (place / "config.json").write_text(json.dumps({"run.best_by": best_by}))
    (place / "status.json").write_text(json.dumps({"state": state, "step": 10 * len(top1s)}))
    rows = [
        {"step": 10 * n, "epoch": float(n), "val/top1": top1, "val/loss": 1 - top1}
        for n, top1 in enumerate(top1s, 1)
    ]
    (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_page_shows_all_trials_needs_nothing_and_runs_nothing(tmp_path):
    for number, lr in enumerate((0.01, 0.1, 1.0, 0.02, 0.2)):
        run_folder(
            tmp_path, number, [0.3, 0.5 + lr / 10], **{"optim.lr": lr, "a.b": HOSTILE[number % 4]}
        )
    run_folder(tmp_path, 5, [0.9], "interrupted", **{"optim.lr": 0.5, "a.b": HOSTILE[0]})
    trials = results.read_trials(tmp_path)
    best = results.best_of(trials)
    assert (best.number, best.state, trials[5].state) == (2, "done", "stopped")
    assert (
        results.compute_text(trials, 2) == "110 training steps, 92% of 120 for all trials in full"
    )
    text = overview.page_of(
        "<b>", "about", trials, best, {"optim.lr": tune.loguniform(0.01, 1)}, "x"
    )
    shown = Shown(text)
    assert "default-src 'none'" in text
    assert not {"script", "link", "iframe", "b", "img"} & shown.tags
    assert not {"href", "src", "onload", "onmouseover"} & shown.attributes
    assert [row[0] for row in shown.tables[0]] == [
        "trial",
        "002",
        "004",
        "001",
        "003",
        "000",
        "005",
    ]
    assert {"optim.lr", "100%", "Validation loss"} <= set(shown.words)


def test_a_grid_between_bounds_of_many_digits_has_an_importance(tmp_path):
    space = {"optim.lr": tune.loguniform(1 / 3000, 1 / 3), "optim.momentum": tune.uniform(0, 2 / 3)}
    for number, knobs in enumerate(engines.grid(space, 9, seed=0)):
        run_folder(tmp_path, number, [knobs["optim.lr"]], **knobs)
    found = overview.importance_of(results.read_trials(tmp_path), space)
    assert found["optim.lr"] > found["optim.momentum"]


def test_a_winner_by_luck_is_told_from_a_better_one(tmp_path):
    for name, gain in (("luck", (0.02, -0.02, 0.01)), ("better", (0.05, 0.051, 0.049))):
        for seed, more in enumerate(gain):
            run_folder(tmp_path / name / "preset", seed, [0.5])
            run_folder(tmp_path / name / "best", seed, [0.5 + more])
    assert results.confirmed(tmp_path / "luck").endswith(
        "3 fresh seeds): no more than chance explains"
    )
    assert "+5.00 points" in results.confirmed(tmp_path / "better")
    assert results.confirmed(tmp_path / "better").endswith("better")
    for name, top1 in (("preset", 0.5), ("best", 0.75)):
        for seed in range(2):
            run_folder(tmp_path / "loss" / name, seed, [top1], best_by="loss")
    said = results.confirmed(tmp_path / "loss")
    assert said.startswith("best against preset: -0.2500 of loss (95% interval: -0.2500 .. -0.25")
    assert said.endswith("better")


@pytest.mark.parametrize("best_by", ["top1", "loss"])
def test_a_trial_is_as_good_as_the_weights_in_its_best_pt(best_by, tmp_path):
    run_folder(tmp_path, 0, [0.5, 0.9, 0.2], best_by=best_by)
    run_folder(tmp_path, 1, [0.6, 0.7, 0.8], best_by=best_by)
    trials = results.read_trials(tmp_path)
    assert results.best_of(trials).number == 0
    assert results.table_of(trials)[1][:5] == [
        "000",
        "done",
        "3.00",
        *(("90.00%", "0.1000") if best_by == "top1" else ("0.1000", "0.1000")),
    ]
    reported = object.__new__(trial.RunTrial)
    reported.run, reported.told = {"metric": best_by, "every": 1, "unit": 1, "epochs": 3}, 3
    score = reported.report(trials[0].rows, is_done=True)["score"]
    assert score == pytest.approx(0.9 if best_by == "top1" else -0.1)


def test_a_trial_at_its_time_limit_is_saved_and_ends_the_search_with_start_me_again(
    tmp_path, monkeypatch
):
    def start_run(_, output, **__):
        output.write_text("--run.max-minutes is over: saved\n")
        return SimpleNamespace(poll=lambda: EXIT_RESTART, returncode=EXIT_RESTART)

    monkeypatch.setattr(trial, "start_run", start_run)
    monkeypatch.setattr(search.tune, "Tuner", Mock())
    run_folder(tmp_path, 0, [], "interrupted")
    run_folder(tmp_path, 1, [0.5])
    limited = object.__new__(trial.RunTrial)
    limited.setup({"folder": tmp_path / "000", "words": [], "threads": 1})
    with pytest.raises(RuntimeError, match="is over: saved"):
        limited.step()
    with pytest.raises(StoppedError, match="is over: 1 of 2 trials in") as ended:
        search.run_trials(SimpleNamespace(cpus=1, gpus=0), None, None, tmp_path, 2)
    assert ended.value.code == EXIT_RESTART
    assert not results.read_trials(tmp_path)[0].failed


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
    wait_long(lambda: any(trial.evaluations(path) for path in folder.glob("0*")))
    killed.kill()
    killed.communicate()
    wait_long(lambda: not any(trial.is_in_use(path) for path in folder.glob("0*")))
    begun = results.recorded_knobs(folder)
    said, _ = start_search(folder).communicate(timeout=300)
    found = json.loads((folder / "results.json").read_text())
    states = sorted(one["state"] for one in found["trials"])
    assert states in (["done", "done", "failed"], ["done", "failed", "stopped"])  # they are short
    failures = [one["failed"] for one in found["trials"] if one["failed"]]
    assert all("exit code 2: error: " in line and "resnet9_none" in line for line in failures)
    assert f"best: trial {found['best']:03}: python train.py smoke --epochs 2" in said
    for one in found["trials"]:
        place = results.trial_folder(folder, one["number"])
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
