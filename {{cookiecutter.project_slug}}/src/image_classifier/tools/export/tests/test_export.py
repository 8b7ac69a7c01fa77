"""Exported files predict what the model predicts, or are not written.

The template's tests make the graphs and run them, which takes seconds.
"""

import json
import os
import shutil
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import changed, untrained_run
from safetensors import safe_open
from torch import nn

from image_classifier.checkpoints import load_model, loaded
from image_classifier.cli import main
from image_classifier.config import ComputeConfig
from image_classifier.data import LEFT_OUT, Source, open_dataset
from image_classifier.data.crops import fit_square, mean_color
from image_classifier.errors import FaultError
from image_classifier.runtime import platform
from image_classifier.runtime.distributed import World
from image_classifier.runtime.platform import install_command
from image_classifier.tools.export import export as exporting
from image_classifier.tools.export import export_graph, formats


@pytest.fixture
def run(config, photos):
    """A run folder with an untrained model whose predictions are confident."""
    return untrained_run(changed(config, augment__tta="shift"), photos)


@pytest.mark.parametrize("side", [32, 48])
@pytest.mark.parametrize("size", [(40, 90), (100, 21), (32, 32), (20, 25), (375, 500), (3, 400)])
@pytest.mark.parametrize("fit", ["crop", "squash", "pad"])
@pytest.mark.parametrize(("channels", "bits"), [(3, 8), (5, 16)])
def test_the_graph_fits_images_of_any_size_as_evaluation_does(size, side, fit, channels, bits):
    numbers = torch.randint(0, 2**bits, (*size, channels), generator=torch.Generator())
    pixels = numbers.to(torch.uint8 if bits == 8 else torch.uint16)
    expected, mean = torch.empty((side, side, channels), dtype=pixels.dtype), [0.3] * channels
    fit_square(pixels, expected, fit, mean)
    color = mean_color(mean, pixels.dtype).float().view(-1, 1, 1)
    square = export_graph.resized_square(pixels[None], side, fit, color)
    difference = (square[0].permute(1, 2, 0) - expected.float()).abs()
    assert difference.max() <= 1
    assert (difference > 0).float().mean() < (0.005 if bits == 8 else 0.05)


def test_safetensors_hold_the_weights_and_how_to_use_them(run, capsys):
    Path(run, "export").mkdir()
    Path(run, "export", ".model.onnx.0123abcd.tmp").touch()  # of an export that was killed
    assert main(["export", run, "--format", "safetensors"]) == 0
    assert "the same class for 4 of 4 images" in capsys.readouterr().out  # with shifted views
    path = Path(run, "export", "model.safetensors")
    lock = path.with_name(".model.lock")
    assert {*path.parent.iterdir()} == {path, lock}
    assert lock.stat().st_mode & 0o666 == 0o666  # others may export to a folder that they share
    saved = torch.load(f"{run}/checkpoints/best.pt", weights_only=True)["state"]["model"]
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["about"])
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
    torch.testing.assert_close(weights, saved, rtol=0, atol=0)
    assert about["classes"] == ["ant", "bee"]
    assert (about["side"], about["step"], about["mean"]) == (32, 7, [0.5, 0.4, 0.3])
    assert (about["std"], about["fit"], about["channels"]) == ([0.2, 0.3, 0.25], "crop", 3)
    assert about["inputs"].startswith("(batch, height, width, 3) uint8: red, green and blue")
    assert str(Path(run).parent) not in json.dumps(about)  # the file leaves this machine


def test_two_exports_do_not_write_to_the_same_folder(run, refusal):
    folder = Path(run, "export")
    folder.mkdir()
    being_written = folder / ".model.safetensors.0123abcd.tmp"
    being_written.touch()
    hold = f"import sys; from {platform.__name__} import lock; "
    hold += "file = open(sys.argv[1], 'ab'); lock(file); print(flush=True); input()"
    command = [sys.executable, "-c", hold, folder / ".model.lock"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        said = refusal("export", run, "--format", "safetensors")
        assert f"another export is writing to '{folder}': take another --out" in said
        assert being_written.exists()
        other.communicate(b"\n")
    assert main(["export", run, "--format", "safetensors"]) == 0
    assert not being_written.exists()


def test_padded_images_are_answered_as_by_the_model(config, photos):
    run = untrained_run(changed(config, data__fit="pad"), photos)
    assert main(["export", run, "--format", "safetensors"]) == 0
    with safe_open(Path(run, "export", "model.safetensors"), "pt") as file:
        assert json.loads(file.metadata()["about"])["fit"] == "pad"


def test_the_images_are_those_that_an_evaluation_reads(config, photos, tmp_path, monkeypatch):
    run = untrained_run(changed(config, data__test_size=48), photos)
    (tmp_path / "val").mkdir()
    (tmp_path / "val" / "Ant").symlink_to(photos / "val" / "ant")  # one of two classes
    asked = []
    monkeypatch.setattr(
        exporting,
        "open_dataset",
        lambda data, split: asked.append(data) or open_dataset(data, split),
    )
    assert main(["export", run, "--format", "safetensors", "--root", str(tmp_path)]) == 0
    assert asked[0].image_size == 48  # by which prepared images are too small or not


def test_images_without_weight_verify_a_file_as_well(run, monkeypatch, capsys):
    weighted = lambda *how: replace(open_dataset(*how), weights=torch.eye(4)[3])  # noqa: E731
    monkeypatch.setattr(exporting, "open_dataset", weighted)
    assert main(["export", run, "--format", "safetensors", "--images", "2"]) == 0
    assert "the same class for 2 of 2 images" in capsys.readouterr().out


def test_layers_that_share_a_weight_are_written():
    class Tied(nn.Module):
        about = {}  # noqa: RUF012

        def __init__(self):
            super().__init__()
            self.model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
            self.model[1].weight = self.model[0].weight

        def forward(self, images):
            return self.model(images)

    module = Tied()
    content, predict = formats.safetensors(module)
    images = torch.rand(2, 3)
    assert torch.equal(predict(images), module(images))
    nn.init.zeros_(module.model[0].weight)
    assert not torch.equal(predict(images), module(images))  # what the file has
    assert len(content) > 2 * 9 * 4


def test_an_answer_is_the_class_and_whether_the_prediction_counts(config, photos):
    pytest.importorskip("image_classifier.tools.calibration")
    run = untrained_run(config, photos, temperature=2.0, thresholds=(0.8,))
    trained = load_model(run, ComputeConfig(device="cpu"), World(torch.device("cpu")))
    source = open_dataset(trained.config.data, "val")
    reference = exporting.predict_with_model(trained, source, is_raw=False)
    found = reference.to_answers(torch.tensor([[0.9, 0.1], [0.3, 0.7]]))
    assert found.tolist() == [[0, 1], [1, 0]]
    raw = exporting.predict_with_model(trained, source, is_raw=True)
    # Thresholds are of calibrated probabilities, those of a raw file too.
    torch.testing.assert_close(raw.probabilities, reference.probabilities)
    with torch.inference_mode():
        logits = torch.cat([trained.model(image) for image in raw.inputs])
    torch.testing.assert_close(raw.to_probabilities(logits), raw.probabilities)


def test_few_of_the_images_that_verify_a_file_are_in_memory_as_a_whole(run):
    read, alive = [], []

    def reader(index):
        pixels = np.full((50, 60, 3), index, np.uint8)
        read.append(weakref.ref(pixels))
        alive.append(sum(one() is not None for one in read))
        return torch.from_numpy(pixels)

    trained = load_model(run, ComputeConfig(device="cpu"), World(torch.device("cpu")))
    source = Source(torch.zeros(9).long(), ("ant", "bee"), reader=reader)
    reference = exporting.predict_with_model(trained, source, is_raw=False)
    assert [int(image.max()) for image in reference.inputs] == [*range(9)]
    assert max(alive) <= 2


def test_a_run_in_bf16_is_exported_in_float32(config, photos, monkeypatch):
    monkeypatch.setattr(loaded, "usual_precision", lambda _: "bf16")
    compared = []
    predict = exporting.predict_with_model

    def noted(trained, *others):
        compared.append(trained.precision.name)
        return predict(trained, *others)

    monkeypatch.setattr(exporting, "predict_with_model", noted)
    run = untrained_run(changed(config, precision="bf16"), photos)
    assert main(["export", run, "--format", "safetensors"]) == 0
    assert compared == ["fp32"]


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch 2.11, as it loads
def test_a_file_for_several_labels_has_the_threshold_and_probabilities_of_each(
    config, photos, capsys
):
    pytest.importorskip("image_classifier.tools.calibration")
    config = changed(config, model__task="multi-label")
    run = untrained_run(config, photos, temperature=1.5, thresholds=(0.25, 0.5))
    assert main(["export", run, "--format", "safetensors", "pt2"]) == 0
    said = capsys.readouterr().out
    assert "in float32: all labels right " in said
    assert " images, by the thresholds of labels\n" in said
    with safe_open(Path(run, "export", "model.safetensors"), "pt") as file:
        about = json.loads(file.metadata()["about"])
    assert (about["task"], about["thresholds"]) == ("multi-label", [0.25, 0.5])
    assert about["temperature"] == 1.5
    graph = torch.export.load(Path(run, "export", "model.pt2")).module()
    shares = graph(torch.randint(0, 256, (5, 50, 60, 3), dtype=torch.uint8))
    assert not torch.allclose(shares.sum(1), torch.ones(5), atol=0.05)


@pytest.mark.parametrize(
    ("change", "raw_code"),
    [
        (lambda found: found + 0.0011, 0),  # logits that are all higher are the same probabilities
        (lambda found: found * torch.nan, 1),
        (lambda found: found[:1].expand(len(found), -1), 1),  # one image at a time only
    ],
    ids=["offset", "nan", "batch"],
)
def test_a_file_with_other_predictions_is_not_written(change, raw_code, run, monkeypatch, capsys):
    wrong = lambda module: (b"written", lambda images: change(module(images)))  # noqa: E731
    monkeypatch.setitem(formats.FORMATS, "pt2", wrong)
    earlier = Path(run, "export", "model.pt2")
    earlier.parent.mkdir(exist_ok=True)
    earlier.write_bytes(b"of other weights")
    assert main(["export", run, "--format", "pt2"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "its predictions differ" in said
    assert [path.name for path in Path(run, "export").iterdir()] == [".model.lock"]
    assert main(["export", run, "--format", "pt2", "--raw"]) == raw_code
    assert main(["export", run, "--format", "pt2", "--tolerance", "0.01"]) == raw_code


def test_where_a_network_is_no_graph_no_file_of_other_weights_is_left(run, monkeypatch):
    monkeypatch.setitem(formats.FORMATS, "pt2", Mock(side_effect=RuntimeError("no graph")))
    earlier = Path(run, "export", "model.pt2")
    earlier.parent.mkdir(exist_ok=True)
    earlier.write_bytes(b"of other weights")
    assert main(["export", run, "--format", "pt2"]) == 1
    assert not earlier.exists()


@pytest.mark.parametrize(
    ("by_pixel", "rounding", "offset", "said"),
    [
        (0.00001, 1, 0, ""),
        (0.004, 1, 0, "warning"),  # its class changes, as it is a tie
        (-0.03, 1, 0, "warning"),  # a good model, whose answers are the same
        (0.03, 1, 0, "resizing, and its answer with it"),
        (
            0.004,
            3,
            0,
            "resizing, of which pixels differ by 3 and probabilities by ",
        ),  # not by rounding
        (0.004, 1, 0.002, "the network, by 2.0e-03 on the same pixels"),
        (0.004, 1, float("nan"), "the network, by nan"),
    ],
)
def test_rounded_pixels_are_no_fault_and_a_fault_is_ascribed_to_its_half(
    by_pixel, rounding, offset, said, monkeypatch
):
    square = torch.full((1, 8, 8, 1), 100, dtype=torch.uint8)
    near = square + rounding
    pixels = torch.full((1, 9, 9, 1), 100 + rounding, dtype=torch.uint8)

    def probabilities(images):
        second = 0.499 + by_pixel * (images.float().mean((1, 2, 3)) - 100)
        return torch.stack((1 - second, second), dim=1)

    expected = probabilities(square)
    reference = exporting.Reference(
        read=lambda _: pixels,
        squares=[square],
        probabilities=expected,
        names=["photos/ant/7.jpg"],
        to_probabilities=lambda logits: logits,
        to_answers=lambda shares: shares.argmax(1)[:, None],
        labels=torch.tensor([0]),
    )
    resized = near.permute(0, 3, 1, 2).float()
    monkeypatch.setattr(exporting, "resized_square", lambda *_: resized)
    data = SimpleNamespace(eval_size=8, fit="crop", bits=8)
    module = SimpleNamespace(data=data, color=None)

    def verified():
        return exporting.verify(
            lambda images: probabilities(images) + offset, module, reference, 1e-3
        )

    if said in ("", "warning"):
        result, _, warning = verified().partition("\n")
        assert "of 1 images" in result
        assert bool(warning) == bool(said)
        assert not warning or "'photos/ant/7.jpg': the graph rounds resized pixels" in warning
    else:
        with pytest.raises(FaultError, match="not written") as raised:
            verified()
        assert said in str(raised.value)
        assert "most for 'photos/ant/7.jpg'" in str(raised.value)


def test_a_file_that_resizes_otherwise_than_its_graph_is_blamed_for_that(monkeypatch):
    square = torch.full((1, 8, 8, 1), 100, dtype=torch.uint8)
    monkeypatch.setattr(exporting, "resized_square", lambda *_: square.permute(0, 3, 1, 2).float())

    def shares(images):
        return torch.tensor([[0.9, 0.1] if images.shape[1] == 8 else [0.7, 0.3]])

    known = {"read": lambda _: square.new_full((1, 9, 9, 1), 100), "squares": [square]}
    reference = SimpleNamespace(probabilities=torch.tensor([[0.9, 0.1]]), **known)
    module = SimpleNamespace(data=SimpleNamespace(eval_size=8, fit="crop"), color=None)
    fault = exporting.blame(0, shares, module, reference, 1e-3)
    moved = "pixels differ by 0 and probabilities by 2.00e-01"
    assert fault == f"resizing, of which {moved}, and not the network"


def test_a_graph_that_resizes_otherwise_is_refused_and_named(run, monkeypatch, capsys):
    whole = export_graph.resized_square
    monkeypatch.setattr(export_graph, "resized_square", lambda *given: whole(*given).mT)
    assert main(["export", run, "--format", "safetensors"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert ".jpg'" in said


def test_a_mistake_is_answered_in_one_line(run, photos, tmp_path, monkeypatch, refusal):
    monkeypatch.setattr(formats, "ONNX_LIBRARIES", ("onnx_of_nobody",))
    (tmp_path / "other" / "val").mkdir(parents=True)
    (tmp_path / "other" / "val" / "wasp").symlink_to(photos / "val" / "ant")
    for words, expected in {
        "--images 0": "--images 0 is not in 1",
        "--tolerance -1": "--tolerance -1 is not in 0",
        "--format onx": "onnx",
        "--format": "--format needs one or more names",
        "--format onnx": f"onnx_of_nobody: {install_command('onnx_of_nobody')}",
        "--format safetensors --split test": "test",
        "--format safetensors --out /proc/nowhere": "cannot write to '/proc/nowhere'",
        f"--format safetensors --root {tmp_path}/no": f"error: --root '{tmp_path}/no': there",
        f"--format safetensors --root {tmp_path}/other": "not those of the images: 1: wasp",
    }.items():
        assert expected in refusal("export", run, *words.split())
    assert not Path(run, "export").exists()


def test_the_score_that_it_says_is_that_of_the_classes_of_images_with_a_label(
    run, monkeypatch, capsys
):
    reference = exporting.Reference(
        read=lambda _: None,
        squares=[],
        probabilities=torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.8, 0.2], [0.3, 0.7]]),
        names=["photos/ant/7.jpg"] * 4,
        to_probabilities=lambda logits: logits,
        to_answers=lambda shares: torch.stack((shares.argmax(1), shares.argmin(1)), dim=1),
        labels=torch.tensor([0, 1, 1, LEFT_OUT]),
    )
    monkeypatch.setattr(exporting, "predict_with_model", lambda *_: reference)
    monkeypatch.setattr(exporting, "verify", lambda *_: "")
    assert main(["export", run, "--format", "safetensors"]) == 0
    assert ", in float32: top-1 66.67% of 4 val images\n" in capsys.readouterr().out


def test_a_checkpoint_is_exported_to_the_folder_of_its_run(run, tmp_path):
    Path(run, "config.json").touch()
    of_run = Path(run, "checkpoints", "best.pt")
    alone = tmp_path / "checkpoints" / "best.pt"
    alone.parent.mkdir()
    shutil.copy(of_run, alone)
    for path in (of_run, alone):
        assert main(["export", str(path), "--format", "safetensors", "--images", "1"]) == 0
    for folder in (Path(run), alone.parent):
        assert (folder / "export" / "model.safetensors").exists()
    assert not (of_run.parent / "export").exists()


def test_a_file_has_its_name_only_once_it_is_whole(run, monkeypatch, capsys):
    monkeypatch.setattr(os, "replace", Mock(side_effect=OSError(28, "No space left on device")))
    assert main(["export", run, "--format", "safetensors"]) == 1
    assert "model.safetensors': No space left on device\n" in capsys.readouterr().err
    assert [path.name for path in Path(run, "export").iterdir()] == [".model.lock"]
