"""`evaluate` repeats the scores of a run, with the weights, pixels and format that it had."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import changed, on_deep, run_ranks, untrained_run, write_photo

from image_classifier import evaluate as evaluate_module
from image_classifier.checkpoints import loaded as loaded_model
from image_classifier.checkpoints.reading import (
    load_best,
    read_checkpoint,
)
from image_classifier.cli import main
from image_classifier.config import ComputeConfig
from image_classifier.data import DATASETS, loader
from image_classifier.data.datasets.shapes import shapes
from image_classifier.errors import UserError
from image_classifier.extensions import find_tool
from image_classifier.metrics import confusion_of
from image_classifier.precision import Precision
from image_classifier.runtime.distributed import World, join_world
from image_classifier.tools.evaluate import command
from image_classifier.tools.evaluate.evaluate import evaluate_run
from image_classifier.train import train


def test_it_repeats_the_result_of_a_run(trained_once, capsys):
    status = json.loads((trained_once / "status.json").read_text())
    best = status["result"]["val/top1"]
    assert main(["evaluate", str(trained_once), "--device", "cpu"]) == 0
    assert f"top-1 {best:.2%}" in capsys.readouterr().out


def test_a_large_batch_of_training_is_evaluated_in_parts(trained_once, monkeypatch):
    monkeypatch.setattr(loader, "MOST_IMAGES", 7)
    world = World(torch.device("cpu"))
    loaded = loaded_model.load_model(str(trained_once), ComputeConfig(), world)
    batches = [*loaded.open_images("val", world).batches()]
    assert len(batches) > 1
    assert max(len(batch.images) for batch in batches) == 7


def test_it_has_the_averaged_weights_normalization_and_first_layer_of_the_run(config, monkeypatch):
    config = changed(config, optim__ema_decay=0.9, optim__warmup_epochs=0.0, epochs=0.25)
    if tool := find_tool("models", "cifar"):
        config = changed(config, model__name="airbench", model__width=8)
    scores, mean = train(config), (0.3, 0.3, 0.3)
    monkeypatch.setitem(DATASETS, "shapes", lambda *split: replace(shapes(*split), mean=mean))
    if tool:
        zero = lambda model, _: model.whiten.weight.data.zero_()  # noqa: E731
        monkeypatch.setattr(tool.Airbench, "fit", zero)
    again = evaluate_run(config.run.dir, "val", "", config.compute)
    assert again.predictions.source.mean == scores.predictions.source.mean != mean
    assert again.value("loss") == pytest.approx(scores.value("loss"), rel=1e-5)


@pytest.mark.parametrize("usual", ["bf16", "fp32"])  # a CPU with bf16, and one without
def test_it_computes_in_the_format_of_the_run_if_the_cpu_is_fast_in_it(usual, config, monkeypatch):
    train(changed(config, precision="bf16", optim__warmup_epochs=0.0, epochs=0.25))
    monkeypatch.setattr(loaded_model, "usual_precision", lambda _: usual)
    cpu = World(torch.device("cpu"))
    assert loaded_model.load_model(config.run.dir, config.compute, cpu).precision.name == usual


def test_an_apple_gpu_takes_weights_that_were_trained_in_fp16(trained_once, monkeypatch):
    def trained_in_fp16(path):
        best = load_best(path)
        return replace(best, config=changed(best.config, precision="fp16"))

    apple = SimpleNamespace(device=torch.device("mps"), is_same=lambda _: True)
    on_cpu = lambda *how: Precision(*how[:-1], torch.device("cpu"))  # noqa: E731
    monkeypatch.setattr(loaded_model, "load_best", trained_in_fp16)
    monkeypatch.setattr(loaded_model, "Precision", on_cpu)
    loaded = loaded_model.load_model(str(trained_once), ComputeConfig(), apple)
    assert loaded.precision.name == "fp32"


@pytest.mark.parametrize(
    ("capability", "trained_in", "computes_in"),
    [
        ((7, 5), "bf16", "fp32"),  # by emulation it takes many times as long
        ((7, 5), "fp16", "fp16"),
        ((7, 5), "fp32", "fp32"),
        ((8, 0), "bf16", "bf16"),
        ((8, 0), "fp16", "fp16"),
    ],
)
def test_a_gpu_computes_in_the_format_of_the_run_if_it_has_that(
    capability, trained_in, computes_in, trained_once, monkeypatch
):
    names = []

    def precision(name, compute, optim, _):
        names.append(name)
        return Precision("fp32", compute, optim, torch.device("cpu"))

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(loaded_model, "Precision", precision)
    best = load_best(trained_once / "checkpoints" / "best.pt")
    best = replace(best, config=changed(best.config, precision=trained_in))
    loaded_model.place_model(best, ComputeConfig(), World(torch.device("cuda", 0)))
    assert names == [computes_in]


def test_where_memory_runs_out_a_smaller_batch_is_advised_and_fits(
    trained_once, monkeypatch, capsys
):
    predict = evaluate_module.predict_logits

    def predict_up_to_five(model, images, *how):
        if len(images) > 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return predict(model, images, *how)

    monkeypatch.setattr(evaluate_module, "predict_logits", predict_up_to_five)
    words = ["evaluate", str(trained_once), "--device", "cpu"]
    assert main(words) == 1
    assert "out of memory: give a smaller --batch-size than 16" in capsys.readouterr().err
    assert main([*words, "--batch-size", "5"]) == 0
    best = json.loads((trained_once / "status.json").read_text())["result"]["val/top1"]
    assert f"top-1 {best:.2%}" in capsys.readouterr().out


def test_as_many_processes_evaluate_as_are_asked_for_where_it_is_said(monkeypatch):
    start = Mock(return_value=0)
    monkeypatch.setattr(command, "run_in_processes", start)
    assert main(["evaluate", "run", "--processes", "3", "--device", "mps"]) == 0
    _, run, compute = start.call_args.args
    assert (run.processes, compute.device) == (3, "mps")


def test_a_mistake_is_answered_in_one_line(tmp_path, refusal):
    assert "evaluate: RUN run folder, or a checkpoint in one" in refusal("evaluate")
    assert f"no checkpoint '{tmp_path}/no.pt'" in refusal("evaluate", tmp_path / "no.pt")
    (tmp_path / "damaged.pt").write_bytes(b"PK")
    assert "damaged.pt' is damaged: " in refusal("evaluate", tmp_path / "damaged.pt")
    absent = "mps" if torch.cuda.is_available() else "cuda"
    assert f"device {absent}: " in refusal("evaluate", tmp_path, "--device", absent)


def opened_while_saved(old, new):
    """The step that a rank opens if rank 1 first reads an older file; how often it reads."""
    files = [old if os.environ["RANK"] == "1" else new, new]
    loaded_model.load_best = Mock(side_effect=map(load_best, files))
    with join_world(compute := ComputeConfig(device="cpu")) as world:
        loaded = loaded_model.load_model(new, compute, world)
        return loaded.step, loaded_model.load_best.call_count


def test_all_ranks_evaluate_the_same_weights_while_a_run_continues(trained_once, tmp_path):
    new = trained_once / "checkpoints" / "best.pt"
    saved = read_checkpoint(new)
    saved["state"]["best_score"] = 0.0
    torch.save(saved, tmp_path / "old.pt")
    ranks = run_ranks(2, opened_while_saved, tmp_path / "old.pt", new)
    assert ranks == [(saved["state"]["step"], 2)] * 2


def test_images_of_any_channels_are_evaluated_as_in_training(config, satellite, capsys):
    config = on_deep(config, satellite, 5, epochs=1, data__fit="pad")
    loss = train(config).value("loss")
    capsys.readouterr()
    assert main(["evaluate", config.run.dir]) == 0
    assert f"loss {loss:.4f}" in capsys.readouterr().out


@pytest.fixture
def trained(on_photos, photos):
    """A run that divided a folder without parts by the names of its images."""
    root = str(photos / "train")
    train(changed(on_photos, data__root=root, data__val_fraction=0.5, data__limit=0, epochs=1))
    return on_photos.run.dir


def evaluated(run, root, *words):
    """The predictions of `evaluate` for the images in a folder."""
    split = words[0] if words else "val"
    scores = evaluate_run(run, split, str(root), ComputeConfig(device="cpu"))
    return scores.predictions


def test_all_images_of_another_folder_are_scored_also_those_of_some_classes(
    trained, photos, tmp_path, capsys
):
    for name in ("ant", "bee"):
        shutil.copytree(photos / "train" / name, tmp_path / "new" / name)
    (tmp_path / "new/bee/7.jpg").unlink()
    both = evaluated(trained, tmp_path / "new")
    assert f"all 11 images in '{tmp_path}/new', weights of" in capsys.readouterr().out
    assert both.class_counts().tolist() == [6, 5]
    shutil.rmtree(tmp_path / "new/ant")
    (tmp_path / "new/bee").rename(tmp_path / "new/Bee")
    some = evaluated(trained, tmp_path / "new", "test")
    assert "'Bee' is taken for class 'bee'" in capsys.readouterr().out
    assert some.source.classes == ("ant", "bee")
    was, now = (confusion_of(of.predicted, of.source.labels, 2).tolist() for of in (both, some))
    assert now == [[0, 0], was[1]]
    (tmp_path / "new/Bee").rename(tmp_path / "new/cat")
    with pytest.raises(UserError, match="knows the classes 2: ant, bee, which are not those of"):
        evaluated(trained, tmp_path / "new")
    shutil.copytree(photos / "val/bee", tmp_path / "own/Testing/bee")
    assert evaluated(trained, tmp_path / "own").class_counts().tolist() == [0, 2]
    assert "2 test images, weights of" in capsys.readouterr().out


def test_lists_of_the_training_images_are_not_of_another_folder(on_photos, photos, tmp_path):
    pytest.importorskip("image_classifier.tools.check")
    pytest.importorskip("image_classifier.tools.skip_bad_images")
    root, cache = str(photos / "train"), tmp_path / "cache"
    config = changed(on_photos, data__root=root, data__cache=str(cache), epochs=1)
    train(changed(config, data__val_fraction=0.5, data__limit=0, data__on_bad_image="skip"))
    cache.mkdir(exist_ok=True)
    (cache / "quarantine.txt").write_text("ant/0.jpg\tblurred\n")
    new = shutil.copytree(photos / "train", tmp_path / "new")
    (new / "bee" / "3.jpg").write_text("no image")
    found = evaluated(config.run.dir, new)
    assert (len(found.source), found.num_unread) == (12, 1)
    assert not (tmp_path / "run" / "bad_images.txt").exists()


def test_another_folder_is_scored_by_the_table_that_is_in_it(on_photos, tmp_path, monkeypatch):
    pytest.importorskip("image_classifier.tools.label_table")
    monkeypatch.chdir(tmp_path)
    for folder, names in (("photos", ("ant", "bee")), ("new", ("bee", "ant"))):
        rows = ["path,label,split"]
        for number in range(12):
            write_photo(tmp_path / folder / f"{number}.jpg", number)
            rows.append(f"{number}.jpg,{names[number % 2]},{'val' if number > 7 else 'train'}")
        (tmp_path / folder / "labels.csv").write_text("\n".join(rows))
    table = {"data__root": "photos", "data__labels": "photos/labels.csv", "run__dir": "run"}
    train(changed(on_photos, data__batch_size=4, data__limit=0, epochs=1, **table))
    source = evaluate_run("run", "val", "new", ComputeConfig(device="cpu")).predictions.source
    assert source.labels.tolist() == [1, 0, 1, 0]
    Path("new/labels.csv").unlink()
    with pytest.raises(UserError, match=r"--data.labels 'new/labels.csv': there is no such file"):
        evaluate_run("run", "val", "new", ComputeConfig(device="cpu"))


def test_a_table_that_divides_nothing_is_scored_as_a_whole_but_that_of_the_training(
    on_photos, tmp_path, monkeypatch, capsys
):
    pytest.importorskip("image_classifier.tools.label_table")
    monkeypatch.chdir(tmp_path)
    for folder, count in (("photos", 16), ("new", 12)):
        rows = ["path,label"]
        for number in range(count):
            write_photo(tmp_path / folder / f"{folder}{number}.jpg", number)
            rows.append(f"{folder}{number}.jpg,{('ant', 'bee')[number % 2]}")
        (tmp_path / folder / "labels.csv").write_text("\n".join(rows))
    table = {"data__root": "photos", "data__labels": "photos/labels.csv", "run__dir": "run"}
    table["data__val_fraction"] = 0.25
    train(changed(on_photos, data__batch_size=4, data__limit=8, epochs=1, **table))
    shutil.copytree("photos", "moved")
    sizes = [len(evaluated("run", root).source) for root in ("new", "", "photos", "moved")]
    assert sizes[0] == 12
    assert len({*sizes[1:]}) == 1
    assert sizes[1] < 8
    assert "'new/labels.csv': 12 images" in (said := capsys.readouterr().out)
    assert "all 12 images in 'new'" in said


def test_a_wrapper_of_the_classes_is_refused_with_the_flag_of_this_command(
    trained, photos, tmp_path, refusal
):
    shutil.copytree(photos / "train", tmp_path / "wrap/ant")
    assert len(evaluated(trained, tmp_path / "wrap").source) == 12  # a class with folders
    pytest.importorskip("image_classifier.tools.check")
    (tmp_path / "wrap/ant").rename(tmp_path / "wrap/images")
    cure = f"--root '{tmp_path}/wrap/images'"
    assert f", 'ant', 'bee': {cure}" in refusal("evaluate", trained, "--root", tmp_path / "wrap")


def test_the_folder_of_the_training_keeps_its_split_wherever_it_is(trained, photos, tmp_path):
    moved = shutil.copytree(photos / "train", tmp_path / "moved")
    sizes = [len(evaluated(trained, root).source) for root in ("", photos / "train", moved)]
    assert len({*sizes}) == 1
    assert sizes[0] < 12
    assert len(evaluated(trained, photos).source) == 4  # its folder `val`
    assert len(evaluated(trained, photos, "train").source) == 12


def test_a_run_of_any_fold_is_scored_on_another_folder_with_parts(on_photos, photos, tmp_path):
    config = changed(on_photos, data__root=str(photos / "train"), data__limit=0, epochs=1)
    train(changed(config, data__val_fraction=0.5, data__fold=1))
    other = shutil.copytree(photos, tmp_path / "other")
    assert len(evaluated(on_photos.run.dir, other).source) == 4


def test_so_does_that_of_a_run_with_several_labels(on_photos, photos, tmp_path):
    root = str(photos / "train")
    config = changed(on_photos, data__root=root, data__val_fraction=0.5, data__limit=0, epochs=1)
    train(changed(config, model__task="multi-label"))
    moved = shutil.copytree(photos / "train", tmp_path / "moved")
    assert len(evaluated(on_photos.run.dir, moved).source) < 12


def test_a_limit_of_the_training_leaves_out_no_image_of_another_folder(config, photos, tmp_path):
    run = untrained_run(config, photos)
    best = Path(run, "checkpoints", "best.pt")
    saved = torch.load(best, weights_only=True)
    saved["config"]["data.limit"] = 3
    torch.save(saved, best)
    other = shutil.copytree(photos / "train", tmp_path / "other")
    assert len(evaluated(run, other).source) == 12


def test_it_tells_from_which_probability_on_predictions_count(config, photos, capsys):
    pytest.importorskip("image_classifier.tools.calibration")
    run = untrained_run(config, photos, 2.0, (0.6,))
    assert main(["evaluate", run, "--device", "cpu"]) == 0
    told = "calibrated by a temperature of 2.00; predictions count from 60.0% on: "
    assert told in capsys.readouterr().out
