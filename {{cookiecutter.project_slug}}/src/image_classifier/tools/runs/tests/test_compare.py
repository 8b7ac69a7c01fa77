"""`compare` tells differences from chance, and says where it cannot."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import answers_of, changed
from safetensors.torch import load_file, save_file

from image_classifier.cli import main
from image_classifier.config import Config
from image_classifier.data import PathList, Source
from image_classifier.extensions import of_tools
from image_classifier.metrics.predictions import Predictions
from image_classifier.runtime.config_dict import flatten
from image_classifier.tools.runs.saved_runs import (
    best_of,
    read_predictions,
    read_run,
)
from image_classifier.tools.statistics import statistics

COUNT = 1000  # validation images


def write_run(
    folder, right, *, last=0, lr=0.5, rate=500.0, state="done", files=None, loss=0.4, **knobs
):
    """A run whose best weights have `right` images right, and the `last` others; its folder."""
    folder.mkdir(parents=True)
    config = changed(Config(), optim__lr=lr, data__batch_size=100, run__dir=str(folder), **knobs)
    rows = [
        {"step": 1, "train/images_per_second": 0.0},
        {"step": 50, "train/images_per_second": rate},
        {"step": 50, "val/top1": right / COUNT - 0.002, "val/loss": 0.5},
        {"step": 100, "train/images_per_second": rate, "val/top1": right / COUNT, "val/loss": loss},
    ]
    if last:
        rows.append({"step": 150, "epoch": 3.0, "val/top1": last / COUNT, "val/loss": 0.9})
    (folder / "config.json").write_text(json.dumps(flatten(config)))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "status.json").write_text(json.dumps({"state": state}))
    answers = answers_of(("ant", "bee"), torch.tensor([[0, 0], [COUNT - right, right]]))
    if files is not None:
        answers = replace(answers, source=replace(answers.source, pixels=None, **files))
    answers.save(folder / "predictions.safetensors", step=100)
    return str(folder)


def said(capsys, *words):
    """The lines that `compare` prints."""
    assert main(["compare", *words]) == 0
    return capsys.readouterr().out.splitlines()


def test_intervals_and_p_values_are_those_of_the_tables():
    table = {1: 12.706, 2: 4.303, 11: 2.201, 12: 2.179, 30: 2.042, 99: 1.984}
    for freedom, quantile in table.items():
        found = statistics.mean_of([0.0] * (freedom + 1), grain=1.0, is_share=False)
        assert found.high * math.sqrt(freedom + 1) == pytest.approx(quantile, abs=5e-4)
    mcnemar, mean_of = statistics.mcnemar, statistics.mean_of
    assert mcnemar(9, 1) == mcnemar(1, 9) == pytest.approx(2 * 11 / 1024)
    assert mcnemar(0, 0) == mcnemar(5, 5) == mcnemar(6, 5) == 1
    assert mean_of([0.001, 0.001], grain=0.001, is_share=False).low < 0  # less than an image
    assert mean_of([0.02, 0.02], grain=0.001, is_share=False).low > 0
    same = mean_of([1.0, 1.0, 1.0], grain=0.0)  # areas under curves, which have no steps
    assert (same.low, same.high) == (1, 1)


@pytest.mark.parametrize(
    ("status", "count", "step"),
    [({}, 0, 3), ({}, 100, 4), ({"result": {"step": 1}}, 100, 1), ({"result": 1}, 101, 3)],
)
def test_the_score_of_a_run_is_that_of_the_weights_which_it_kept(status, count, step):
    rows = [{"step": n, "val/top1": top1} for n, top1 in enumerate((0.1, 0.8, 0.7, 0.8, 0.79))]
    assert best_of(rows, "top1", status, count)["step"] == step


def test_the_metric_that_decides_is_compared_and_less_loss_is_better(tmp_path, capsys, refusal):
    by_loss = [
        [
            write_run(
                tmp_path / f"{lr}/{seed}", 850, lr=lr, seed=seed, loss=loss, run__best_by="loss"
            )
            for seed, loss in enumerate(losses)
        ]
        for lr, losses in (
            (0.5, (0.41, 0.4, 0.42)),
            (0.3, (0.311, 0.3, 0.319)),
            (0.1, (0.4098, 0.3998, 0.4197)),
        )
    ]
    lines = said(capsys, *by_loss[0], *by_loss[1])
    assert lines[0].split() == ["run", "seed", "loss", "last", "loss", "training", "images/s"]
    assert any(
        "loss of best.pt: B is better by 0.1000 (95% interval: 0.09" in line for line in lines
    )
    # A loss has no steps, as the share of 1,000 images has.
    close = said(capsys, *by_loss[0], *by_loss[2])
    assert "loss of best.pt: B is better by 0.0002 (95% interval: 0.0001 .. 0.0004" in close[9]
    other = write_run(tmp_path / "other", 850, lr=0.1, seed=0)
    assert "are the best by loss and by top1: compare runs with the same --run.best-by" in refusal(
        "compare", by_loss[0][0], other
    )


def test_of_several_labels_all_must_be_right(tmp_path, capsys):
    labels, runs = torch.tensor([[1, 0], [1, -1], [0, 1]] * 8, dtype=torch.int8), []
    for lr, wrong in ((0.1, [0, 3, 6, 9, 12, 15, 18]), (0.2, [1])):
        runs.append(write_run(tmp_path / str(lr), 3, lr=lr))
        predicted = labels.clamp(min=0)
        predicted[wrong, 0] = 0
        source = Source(labels, ("ant", "bee"), reader=len)
        answers = Predictions(source, predicted, *[torch.ones(24, 2)] * 3)
        answers.save(Path(runs[-1], "predictions.safetensors"), step=100)
    lines = said(capsys, *runs)
    assert any("all labels right of best.pt: no significant" in line for line in lines)
    assert "  only A is right on 1 images, only B on 7" in lines


def test_recipes_or_folders_of_runs_are_paired_seed_by_seed(tmp_path, capsys):
    knobs = {"rate": 250.0, "lr": 0.3, "run__init_from": "w.pt"}
    a = [write_run(tmp_path / f"a/{n}", 850 + 20 * n, seed=n) for n in range(3)]
    b = [write_run(tmp_path / f"b/{n}", 858 + 22 * n, seed=n, **knobs) for n in range(3)]
    lines = said(capsys, *a, *b)
    assert [line.split()[0] for line in lines[1:7]] == ["A"] * 3 + ["B"] * 3
    assert lines[4].split()[2:] == ["0", "85.80%", "85.80%", "0.4000", "0:40", "250"]
    reach = 100 * 4.303 * 0.002 / math.sqrt(3)
    real = f"points (95% interval: {1 - reach:.2f} .. {1 + reach:.2f}, 3 seeds): significant"
    assert lines[8:] == [
        "B against A: optim.lr 0.5 -> 0.3, run.init_from '' -> 'w.pt'",
        f"  top-1 of best.pt: B is better by 1.00 {real}",
        f"  top-1 of the last weights: B is better by 1.00 {real}",
    ]
    assert said(capsys, *b, *a)[9] == f"  top-1 of best.pt: A is better by 1.00 {real}"
    assert said(capsys, f"{tmp_path}/a", f"{tmp_path}/b") == lines
    (tmp_path / "again").symlink_to("a")
    same = said(capsys, f"{tmp_path}/a", f"{tmp_path}/again")
    assert same[8] == "B against A: the same config"
    assert same[9].startswith(
        "  top-1 of best.pt: no significant difference: B is ahead by 0.00 points"
    )


def test_of_one_seed_two_models_are_compared_and_no_recipes(tmp_path, capsys):
    a, b = (write_run(tmp_path / f"{n}", n, lr=n) for n in (900, 920))
    lines = said(capsys, a, b, write_run(tmp_path / "c\x1b[2J", 902, state="running"))
    assert all(line.isprintable() for line in lines)
    text = "\n".join(lines)
    basis = "(95% interval: 1.11 .. 2.88, 1,000 images, McNemar's p 1.9e-06)"
    assert f"B is better by 2.00 points {basis}: significant" in text
    assert "only A is right on 0 images, only B on 20" in text
    assert text.count("this compares two models, not two recipes") == 2
    assert text.count("not at their end, so their scores may change") == 1
    assert (
        "no significant difference: C is ahead by 0.20 points (95% interval: -0.14 .. 0.54, "
        in text
    )
    assert "c\\x1b[2J (running)" in text
    assert "one in 20 comparisons" in text


def test_what_can_not_be_compared_is_refused_in_a_line(tmp_path, refusal):
    a, b = write_run(tmp_path / "a", 900), Path(write_run(tmp_path / "b", 910, lr=0.3))
    assert "nothing to compare with" in refusal("compare", a)
    assert "is not a run folder" in refusal("compare", a, tmp_path / "nope")
    assert "both have --seed 0" in refusal("compare", a, tmp_path)
    far = [write_run(tmp_path / f"far{n}", 900, seed=n, lr=0.2) for n in (1, 2)]
    assert "nothing can be paired" in refusal("compare", a, *far)
    with (b / "metrics.jsonl").open("a") as file:  # continued since it wrote its predictions
        file.write('{"step": 150, "epoch": 3.0, "val/top1": 0.95, "val/loss": 0.3}\n')
    assert "no predictions.safetensors of its best weights" in refusal("compare", a, b)
    (b / "predictions.safetensors").write_bytes(b"\x80\x04K\x01.")
    assert "predictions.safetensors' can" in refusal("compare", a, b)
    (b / "metrics.jsonl").write_text("")
    assert "it has no evaluation yet" in refusal("compare", a, b)


def test_a_run_is_as_good_as_the_weights_in_its_best_pt(tmp_path, capsys):
    a = [write_run(tmp_path / f"a/{n}", 900 + n, seed=n, last=700 + n) for n in range(3)]
    b = [write_run(tmp_path / f"b/{n}", 880 + n, seed=n, lr=0.1) for n in range(3)]
    lines = said(capsys, *a, *b)
    assert lines[1].split()[2:6] == ["0", "90.00%", "70.00%", "0.4000"]
    assert any("top-1 of best.pt: A is better by 2.00 points" in line for line in lines)
    assert any("top-1 of the last weights: B is better by 18.00 points" in line for line in lines)
    assert any("only A is right on 20 images" in line for line in said(capsys, a[0], b[0]))


def test_predictions_of_an_older_version_are_read(tmp_path):
    path = Path(write_run(tmp_path / "a", 900), "predictions.safetensors")
    new = read_predictions(path)
    about = {"files": json.dumps(new.files), "classes": json.dumps(new.classes)}
    save_file(load_file(path), path, about | {"step": "100", "images": new.images})
    old = read_predictions(path)
    assert (old.images, old.files, old.classes, old.step) == (new.images, {}, ("ant", "bee"), 100)


def test_scores_on_other_images_are_not_compared(tmp_path, capsys, refusal):
    image, runs = tmp_path / "image", [write_run(tmp_path / "in memory", 900)]
    files = {"paths": PathList(tmp_path, [b"image"] * COUNT)}
    for number, content in enumerate((b"one", b"one", b"two"), 1):
        image.write_bytes(content)
        os.utime(image, (number, 0))  # a copy has another time
        runs.append(write_run(tmp_path / f"{number}", 900, lr=number, files=files))
    assert "no significant difference" in "".join(said(capsys, *runs[1:3]))
    assert f"images of '{runs[0]}' and '{runs[1]}' differ" in refusal("compare", *runs[:2])
    assert f"images of '{runs[1]}' and '{runs[3]}' differ" in refusal("compare", runs[1], runs[3])
    files["recipe"] = "raw"  # the same images, prepared
    prepared = write_run(tmp_path / "prepared", 900, lr=4, files=files)
    assert "no significant difference" in "".join(said(capsys, runs[3], prepared))


def test_damaged_files_of_a_run_are_left_out_or_refused_in_a_line(damaged, tmp_path, capsys):
    a, b = write_run(tmp_path / "a", 900), write_run(tmp_path / "b", 910, lr=0.3)
    for name in ("metrics.jsonl", "status.json", "config.json"):
        rows = Path(b, name).read_bytes() if name == "metrics.jsonl" else b""
        Path(b, name).write_bytes(damaged + b"\n" + rows)
        code = main(["compare", a, b])
        assert capsys.readouterr().err.count("\n") == (code == 2)
        assert code == (2 if name == "config.json" else 0)


def test_only_seeds_that_both_have_are_compared(tmp_path, capsys):
    a = [write_run(tmp_path / f"a/{n}", 850 + 20 * n, seed=n) for n in range(3)]
    b = [write_run(tmp_path / f"b/{n}", 860 + 21 * n, seed=n, lr=0.1) for n in (1, 2, 3)]
    assert "B is better by 1.15 points" in (text := "\n".join(said(capsys, *a, *b)))
    assert ", 2 seeds)" in text


def test_a_folder_that_still_has_runs_of_another_recipe_is_no_group(tmp_path, refusal):
    new = [write_run(tmp_path / f"a/{n}", 900, seed=n, lr=0.1) for n in (0, 1, 2)]
    old = write_run(tmp_path / "a/3", 900, seed=3)
    for n in range(4):  # on another machine
        write_run(tmp_path / f"b/{n}", 910, seed=n, lr=0.3, precision=("fp32", "bf16")[n % 2])
    said = refusal("compare", tmp_path / "b", tmp_path / "a")
    assert f"'{new[0]}' and '{old}' are in one group, and differ in optim.lr: name the" in said


def test_what_a_last_layer_begins_with_is_part_of_a_recipe(tmp_path, capsys):
    if "run.init_head" not in of_tools():
        pytest.skip("the tool linear-probe is not here")
    a, b = (write_run(tmp_path / head, 900, run__init_head=head) for head in ("probe", "zero"))
    assert "B against A: run.init_head 'probe' -> 'zero'" in said(capsys, a, b)


def test_the_speed_of_a_run_is_its_median(tmp_path):
    folder = Path(write_run(tmp_path / "a", 900))  # twice 500 images per second
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 150, "epoch": 3.0, "train/images_per_second": 9000.0}\n')
    assert read_run(folder).images_per_second == 500
