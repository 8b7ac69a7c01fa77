"""Several runs are one model, by the mean of their probabilities or of their weights."""

import json
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from conftest import changed, untrained_run
from safetensors.torch import load_file
from torch import nn

from image_classifier.checkpoints import LoadedModel, load_model
from image_classifier.cli import main
from image_classifier.config import ComputeConfig, ModelConfig
from image_classifier.errors import UserError
from image_classifier.extensions import find_tool
from image_classifier.models import build_model
from image_classifier.runtime.distributed import World
from image_classifier.tools.ensemble import (
    ensemble,
    network,
    soup,
)
from image_classifier.train import train

CPU, COMPUTE = World(torch.device("cpu")), ComputeConfig(device="cpu")


def noisy(seed):
    """A function that gives a checkpoint other weights and another normalization."""

    def change(saved):
        generator = torch.Generator().manual_seed(seed)
        for weight in saved["state"]["model"].values():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.05)
        saved["mean"] = [mean + 0.02 * seed for mean in saved["mean"]]
        saved["std"] = [std * (1 + 0.1 * seed) for std in saved["std"]]

    return change


@pytest.fixture
def make(config, photos, tmp_path):
    """A function that writes an untrained run of its own weights, and returns its folder."""

    def make_run(name, seed, temperature=1.0, thresholds=(), change=None, **knobs):
        folder = tmp_path / name
        untrained_run(
            changed(config, run__dir=str(folder), **knobs), photos, temperature, thresholds
        )
        saved = torch.load(folder / "checkpoints" / "best.pt", weights_only=True)
        noisy(seed)(saved)
        if change:
            change(saved)
        torch.save(saved, folder / "checkpoints" / "best.pt")
        return str(folder)

    return make_run


@pytest.fixture
def join(tmp_path):
    """A function that makes an ensemble of runs, and returns its folder."""

    def join_runs(*runs, name="all"):
        assert main(["ensemble", *runs, "--dir", str(tmp_path / name)]) == 0
        return str(tmp_path / name)

    return join_runs


def probabilities(run, pixels):
    """What `predict` makes of a run's logits."""
    loaded = load_model(run, COMPUTE, CPU)
    with torch.inference_mode():
        logits = loaded.model(loaded.normalize(pixels)) / loaded.decision.temperature
    has_several = loaded.config.model.task == "multi-label"
    return logits.sigmoid() if has_several else logits.softmax(1)


def images(count=16):
    """Random pixels, as `Normalize` takes them."""
    generator = torch.Generator().manual_seed(9)
    return torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("task", ["single-label", "multi-label"])
@pytest.mark.parametrize("head", ["last", "layers"])
def test_its_probabilities_are_the_mean_of_those_of_its_runs(task, head, make, join):
    pytest.importorskip("image_classifier.tools.calibration")
    knobs = {"model__task": task}
    if head != "last":
        pytest.importorskip("image_classifier.tools.head_layers")
        knobs["model__head"] = head
    runs = [make(f"run{n}", n, temperature=(1.0, 0.3, 3.0)[n], **knobs) for n in range(3)]
    each = torch.stack([probabilities(run, images()) for run in runs])
    assert (each.amax(0) - each.amin(0)).mean() > 0.05  # they differ
    found = probabilities(join(*runs), images())
    torch.testing.assert_close(found, each.mean(0), atol=1e-5, rtol=0)


@pytest.mark.parametrize("task", ["single-label", "multi-label"])
def test_logits_are_exact_where_the_runs_are_certain(task):
    model = ModelConfig(name="resnet9_gn", width=8, members=2, task=task)
    both = build_model(model, 3, 32).eval()
    for member in both.members:
        torch.nn.init.zeros_(member.head.weight)
        member.head.bias.data = torch.tensor([800.0, -800.0, 0.0])  # a quarter is the logit
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        logits = both(torch.zeros(2, 3, 32, 32))
    wanted = [200.0, -200.0, 0.0] if task == "multi-label" else [0.0, -400.0, -200.0]
    torch.testing.assert_close(logits, torch.tensor([wanted] * 2))


def test_commands_take_it_as_a_run(make, join, photos, tmp_path, capsys):
    both = join(make("run0", 0), make("run1", 1))
    said = capsys.readouterr().out
    assert "2 runs are one model, by the mean of their probabilities" in said
    assert f"evaluate {both} --root PHOTOS" in said
    assert f"predict {both} PHOTO.jpg" in said
    assert "judge the model by" not in said
    if find_tool("command", "evaluate"):
        assert main(["evaluate", both, "--device", "cpu"]) == 0
        assert "4 val images, weights of step 7" in capsys.readouterr().out
    if find_tool("command", "predict"):
        words = ["predict", both, str(photos / "val"), "--device", "cpu", "--workers", "0"]
        assert main([*words, "--out", str(tmp_path / "labels.jsonl")]) == 0
        assert len((tmp_path / "labels.jsonl").read_text().splitlines()) == 4


def test_runs_that_started_over_leave_no_mark_of_that(make, join):
    both = join(make("run0", 0, run__fresh=True), make("run1", 1))
    assert {path.name for path in Path(both).iterdir()} == {".lock", "checkpoints"}
    assert not load_model(both, COMPUTE, CPU).config.run.fresh


def test_it_is_exported_with_what_sets_its_runs_apart(make, join, capsys):
    pytest.importorskip("image_classifier.tools.export")
    both = join(make("run0", 0), make("run1", 1, temperature=2.0))
    assert main(["export", both, "--format", "safetensors"]) == 0
    assert "the same class for 4 of 4 images" in capsys.readouterr().out
    weights = load_file(Path(both, "export", "model.safetensors"))
    shared = load_model(both, COMPUTE, CPU).weights
    torch.testing.assert_close(weights, dict(shared), rtol=0, atol=0)
    assert weights["scale"][1].max() < 1 < weights["temperature"][1]


def test_thresholds_are_the_median_of_those_of_its_runs(make, join):
    pytest.importorskip("image_classifier.tools.calibration")

    def decision(name, each, **knobs):
        runs = [make(f"{name}{n}", n, 3.0, given, **knobs) for n, given in enumerate(each)]
        return load_model(join(*runs, name=name), COMPUTE, CPU).decision

    several = decision("a", [(0.2, 0.9), (0.4, 2.0), ()], model__task="multi-label")
    assert several.thresholds == (0.4, 0.9)
    assert decision("b", [(0.8,), (2.0,), (0.9,)]).thresholds == (0.9,)
    assert decision("d", [(0.8,), (0.9,)]).thresholds == (pytest.approx(0.85),)
    for never in ([(0.8,), (2.0,)], [(2.0,), (0.8,), (0.7,), (2.0,)]):  # half of them
        assert decision(f"e{len(never)}", never).thresholds == (0.8,)
    assert decision("f", [(2.0,), ()]).thresholds == (0.0,)
    plain = decision("c", [(), ()])
    assert (plain.temperature, plain.thresholds) == (1.0, ())


def test_a_folder_of_folds_stands_for_its_runs_wherever_it_is(make, join, tmp_path, capsys):
    folds = [make(f"folds/fold-{n}", n, data__fold=n) for n in range(2)]
    make("folds/fold-2", 2)  # of an earlier command, with more folds
    result = {"runs": [{"folder": f"elsewhere/fold-{n}"} for n in range(2)]}
    (tmp_path / "folds" / "results.json").write_text(json.dumps(result))
    found = probabilities(join(str(tmp_path / "folds")), images())
    assert (
        "1 of them were validated on other images, and may have learned from"
        in capsys.readouterr().out
    )
    each = torch.stack([probabilities(fold, images()) for fold in folds])
    torch.testing.assert_close(found, each.mean(0), atol=1e-5, rtol=0)


def test_runs_that_do_not_fit_together_are_refused_in_a_line(make, tmp_path, refusal):
    first = make("first", 0)

    def said(*runs):
        line = refusal("ensemble", *runs, "--dir", tmp_path / "all")
        assert not (tmp_path / "all").exists()
        return line

    def other(name, **knobs):
        return said(first, make(name, 1, **knobs))

    assert "of 2 to 100 runs, and 1 run is named" in said(first)
    assert "is the same file as" in said(first, first)
    assert "there is no checkpoint" in said(first, tmp_path / "nowhere")
    assert "there is no checkpoint" in said(first, tmp_path)
    wasps = lambda saved: saved.update(classes=["ant", "wasp"])  # noqa: E731
    assert "knows the classes 2: ant, wasp, which are not those of" in other("a", change=wasps)
    assert "--model.width 16, " in other("b", model__width=16)
    assert "--data.image-size 48, " in other("c", data__image_size=48)
    assert "--model.task multi-label, " in other("d", model__task="multi-label")
    assert "--data.bits 16, " in other("e", data__bits=16)
    assert "--data.test-size 40, " in other("l", data__test_size=40)
    assert "--data.fit pad, " in other("f", data__fit="pad")
    assert "--augment.tta flip, " in other("g", augment__tta="flip")
    dark = lambda saved: saved.update(mean=[0.1, 0.1, 0.1])  # noqa: E731
    padded = make("m", 1, data__fit="pad")
    line = said(padded, make("n", 2, data__fit="pad", change=dark))
    assert "pads images with its mean color, 0.1, 0.1, 0.1, and" in line
    fewer = lambda saved: saved["state"]["model"].popitem()  # noqa: E731
    assert "holds weights of another network than" in other("h", change=fewer)
    both = [make(name, n, change=fewer) for n, name in enumerate("jk")]
    assert "holds another model: Missing key" in said(*both)
    (tmp_path / "results.json").write_text('{"runs": [1]}')
    assert "is not of `cross-validate` or `repeat`" in said(tmp_path)
    damaged = Path(make("i", 1), "checkpoints", "best.pt")
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 255
    damaged.write_bytes(content)
    assert "is damaged: wrong checksum" in said(first, damaged)


def test_knobs_of_training_may_differ(make, join):
    def adapt(saved):  # its adapters are added to its weights when it is read
        saved["config"] |= {"model.lora_rank": 2, "run.init_from": "weights.pt"}

    others = [make("run2", 2, change=adapt)] * (find_tool("network", "lora") is not None)
    join(make("run0", 0), make("run1", 1, model__dropout=0.5, optim__lr=0.1, epochs=1), *others)


def test_an_ensemble_is_neither_a_member_nor_trained(make, join, config, refusal, tmp_path):
    first = make("run0", 0)
    both = join(first, make("run1", 1))
    line = refusal("ensemble", both, first, "--dir", tmp_path / "more")
    assert "is an ensemble already: name the runs" in line
    with pytest.raises(UserError, match=r"--model.members 2: an ensemble is not trained"):
        train(changed(config, model__members=2))


def test_a_folder_with_a_run_is_left_alone(make, join, refusal):
    runs = [make(f"run{n}", n) for n in range(3)]
    both = join(*runs[:2])
    before = Path(both, "checkpoints", "best.pt").read_bytes()
    line = refusal("ensemble", *runs, "--dir", both)
    assert "is not empty: it has 'checkpoints/best.pt'; take another --dir" in line
    assert Path(both, "checkpoints", "best.pt").read_bytes() == before


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_write_that_fails_leaves_nothing_and_can_be_repeated(
    is_killed, make, join, tmp_path, monkeypatch
):
    runs = [make(f"run{n}", n) for n in range(2)]

    def fail(_, file):
        file.write(b"half")
        if is_killed:  # nothing is cleaned up after that
            patch.setattr(Path, "unlink", lambda *_, **__: None)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt, AssertionError):
        patch.setattr(ensemble.torch, "save", fail)
        join(*runs)
    assert not (tmp_path / "all" / "checkpoints" / "best.pt").exists()
    assert len([*(tmp_path / "all").rglob("*.tmp")]) == is_killed
    assert Path(join(*runs), "checkpoints", "best.pt").exists()
    assert not [*(tmp_path / "all").rglob("*.tmp")]


def test_heat_maps_are_of_all_runs_and_features_of_one_alone(make, join, photos, tmp_path, refusal):
    heat = find_tool("heat", "explain") or pytest.skip("needs the tool explain")
    runs = [make(f"run{n}", n) for n in range(2)]
    both = join(*runs)
    maps = []
    classes = torch.tensor([0, 1])
    for run, function in ((runs[0], heat.maps_of), (runs[1], heat.maps_of), (both, heat.heat_maps)):
        loaded = load_model(run, COMPUTE, CPU)
        maps.append(function(loaded.model, loaded.normalize(images(2)), classes))
    mean = (maps[0] + maps[1]) / 2
    low, high = mean.flatten(1).aminmax(dim=1)
    wanted = (mean - low[:, None, None]) / (high - low)[:, None, None]
    torch.testing.assert_close(maps[2], wanted, atol=1e-4, rtol=0)
    assert (maps[0] - maps[1]).abs().max() > 0.05
    if find_tool("command", "predict"):
        words = ["predict", both, photos / "val", "--embeddings", tmp_path / "features.npy"]
        assert "an ensemble has no features; name one of its runs" in refusal(*words)
        assert not (tmp_path / "features.npy").exists()


def test_a_hook_for_weights_of_a_library_does_not_see_those_of_an_ensemble():
    def rename(_, weights, *__):
        for name in [*weights]:
            weights[name.replace("head.", "head.fc.")] = weights.pop(name)

    single = nn.Sequential(OrderedDict(head=nn.Linear(3, 2)))
    single.register_load_state_dict_pre_hook(rename)
    both = network.wrap_network(single, ModelConfig(members=2), 3)
    weights = {name: tensor + 1 for name, tensor in both.state_dict().items()}
    both.load_state_dict(weights)
    torch.testing.assert_close(dict(both.state_dict()), weights)


def test_a_student_learns_from_it(make, join, on_photos):
    pytest.importorskip("image_classifier.tools.distill")
    both = join(make("run0", 0), make("run1", 1))
    train(changed(on_photos, optim__teacher=both, epochs=1, optim__warmup_epochs=0))
    assert Path(on_photos.run.dir, "checkpoints", "best.pt").exists()


def soup_of(*runs, folder):
    """The words that make one network of the mean of the weights of runs."""
    return ["ensemble", *runs, "--dir", str(folder), "--average", "weights", "--device", "cpu"]


def alike(saved, blue=0.25):
    """Give a checkpoint the usual normalization."""
    saved |= {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, blue]}


def moved(saved):
    """Let a checkpoint be of images elsewhere."""
    alike(saved)
    saved["config"]["data.root"] = "other"


def score_by(scores, metric, monkeypatch):
    """Let each evaluation find the next of `scores`, which it takes away, as its `metric`."""
    evaluate = LoadedModel.evaluate

    def scored(*given):
        found = evaluate(*given)
        found.known[metric] = scores.pop(0)
        return found

    monkeypatch.setattr(LoadedModel, "evaluate", scored)


def test_averaged_weights_are_written_only_if_they_gain(make, tmp_path, monkeypatch, capsys):
    runs = [make(f"run{n}", n, change=alike, run__init_from="w.pt") for n in range(3)]
    scores = []
    score_by(scores, "top1", monkeypatch)
    scores += [0.5, 0.7, 0.6, 0.7]
    assert main(soup_of(*runs, folder=tmp_path / "no")) == 0
    assert "no gain: the mean of the weights is not better" in capsys.readouterr().out
    assert not (tmp_path / "no").exists()
    scores += [0.5, 0.7, 0.6, 0.8]
    assert main(soup_of(*runs, folder=tmp_path / "yes")) == 0
    assert "top-1 80.00%: the mean of their weights" in capsys.readouterr().out
    found = load_model(str(tmp_path / "yes"), COMPUTE, CPU)
    assert found.config.model.members == 1
    assert (found.decision.temperature == 1) == (find_tool("decision", "calibration") is None)
    each = [load_model(run, COMPUTE, CPU).weights for run in runs]
    for name, weight in found.weights.items():
        wanted = torch.stack([weights[name] for weights in each]).mean(0)
        torch.testing.assert_close(weight, wanted, atol=1e-6, rtol=0)


def test_where_less_is_better_the_mean_is_compared_with_the_least(
    make, tmp_path, monkeypatch, capsys
):
    knobs = {"run__init_from": "w.pt", "run__best_by": "loss"}
    runs = [make(f"run{n}", n, change=alike, **knobs) for n in range(2)]
    scores = [0.5, 0.7, 0.6, 0.5, 0.7, 0.4]
    score_by(scores, "loss", monkeypatch)
    for name, is_written in (("no", False), ("yes", True)):
        assert main(soup_of(*runs, folder=tmp_path / name)) == 0
        assert (tmp_path / name).exists() == is_written
    assert "loss 0.4000: the mean of their weights" in capsys.readouterr().out


def test_averaged_weights_are_judged_as_evaluate_judges(make, tmp_path, monkeypatch, capsys):
    pytest.importorskip("image_classifier.tools.evaluate")
    knobs = {"run__init_from": "w.pt", "run__best_by": "brier"}
    runs = [make(f"run{n}", n, change=alike, **knobs) for n in range(2)]
    monkeypatch.setattr(soup, "better", lambda _: 0)  # none is better
    assert main(soup_of(*runs, folder=tmp_path / "mean")) == 0
    rows = capsys.readouterr().out.splitlines()
    for run in runs:
        assert main(["evaluate", run, "--device", "cpu"]) == 0
        (score,) = [row.partition(": ")[0] for row in rows if f"{run}/" in row]
        assert score.startswith("Brier score ")
        assert score in capsys.readouterr().out


def test_averaged_weights_are_judged_on_the_device_that_is_asked_for(make, tmp_path, refusal):
    runs = [make(f"run{n}", n, change=alike, run__init_from="w.pt") for n in range(2)]
    absent = "mps" if torch.cuda.is_available() else "cuda"
    words = soup_of(*runs, folder=tmp_path / "mean")[:-1]
    assert f"--device {absent}: " in refusal(*words, absent)


def test_statistics_are_averaged_and_counts_are_not():
    each = [{"mean": torch.tensor([n, 2.0]), "count": torch.tensor(n)} for n in (1, 4)]
    assert soup.mean_weights(each)["mean"].tolist() == [2.5, 2.0]
    assert soup.mean_weights(each)["count"].item() == 1


def test_weights_that_have_no_common_origin_are_not_averaged(make, tmp_path, refusal):
    first = make("run0", 0, change=alike, run__init_from="w.pt")

    def said(name, change=alike, init_from="w.pt", **knobs):
        own = make(name, 1, change=change, run__init_from=init_from, **knobs)
        line = refusal(*soup_of(first, own, folder=tmp_path / "mean"))
        assert "take --average probabilities" in line
        assert not (tmp_path / "mean").exists()
        return line

    assert "began with random weights" in said("a", init_from="")
    assert "began with those of v.pt" in said("b", init_from="v.pt")
    assert "(--data.val-fraction 0.3, not " in said("e", data__val_fraction=0.3)
    assert "(--data.root other, not " in said("g", change=moved)
    line = said("c", data__fold=1)
    assert "was validated on other images than" in line
    assert "(--data.fold 1, not 0)" in line
    for name, own in (("d", None), ("f", lambda saved: alike(saved, blue=0.3))):
        assert "are normalized otherwise than for" in said(name, change=own)
    scratch = [make(f"scratch{n}", n, change=alike) for n in range(2)]
    assert "began with random weights" in refusal(*soup_of(*scratch, folder=tmp_path / "mean"))
