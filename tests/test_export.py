"""An exported model runs without the project that trained it, and predicts the same."""

import json
import re
from contextlib import redirect_stdout
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
from conftest import PROJECT, SMOKE, python
from image_classifier.cli import main
from image_classifier.errors import UserError
from image_classifier.tools.export import formats
from PIL import Image
from torch import nn

pytest.importorskip("onnxruntime")  # not for every Python at once

README = PROJECT / "src/image_classifier/tools/export/README.md"


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A folder with a run that is exported with preprocessing, and without in `raw`."""
    folder = tmp_path_factory.mktemp("export")
    export = f"export {folder}/run --images 32 --out {folder}"
    train = f"train {SMOKE} --run.trackers --run.dir {folder}/run"
    with (folder / "said.txt").open("w") as said, redirect_stdout(said):
        for words in (train, export, f"{export}/raw --raw --format onnx pt2"):
            assert main(words.split()) == 0
    assert (folder / "said.txt").read_text().count("the same class for 32 of 32 images") == 5
    return folder


def test_the_examples_of_the_readme_run_without_the_project_and_agree(exported):
    photo = Image.effect_mandelbrot((90, 61), (-2, -1, 0.5, 1.3), 100).convert("RGB")
    photo.save(exported / "photo.png")
    turned = photo.transpose(Image.Transpose.ROTATE_90)  # as cameras save what is upright
    turned.getexif()[0x0112] = 6
    turned.save(exported / "turned.png", exif=turned.getexif())
    programs = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    words = ("photo.png", "turned.png")
    first, second = (
        python("-W", "error", "-c", program, *words, folder=exported, PYTHONPATH="")
        for program in programs
    )
    assert re.fullmatch(r"(\d+\.\d\d% \w+\n)\1", first)  # the turned one is upright again
    assert first == second


def test_the_onnx_file_is_whole_and_says_what_it_is(exported):
    for folder, names, sizes in (
        (".", ("images", "probabilities"), ["batch", "height", "width", 3]),
        ("raw", ("images", "logits"), ["batch", 3, 32, 32]),
    ):
        path = exported / folder / "model.onnx"
        model = onnx.load(path, load_external_data=False)
        onnx.checker.check_model(model, full_check=True)
        assert not [weight for weight in model.graph.initializer if weight.external_data]
        assert model.opset_import[0].version == 18
        (images,), (results,) = model.graph.input, model.graph.output
        assert (images.name, results.name) == names
        shape = [size.dim_param or size.dim_value for size in images.type.tensor_type.shape.dim]
        assert shape == sizes
        about = {entry.key: json.loads(entry.value) for entry in model.metadata_props}
        assert (len(about["classes"]), about["side"]) == (10, 32)
        paths_of_this_machine = rf"/site-packages|\.py\", line|{exported}".encode()
        for file in path.parent.glob("model.*"):
            assert not re.search(paths_of_this_machine, file.read_bytes())


def test_deep_images_of_five_channels_are_answered_alike_by_the_onnx_file(tmp_path, capsys):
    for number in range(20):
        folder = tmp_path / "fields" / ("train", "val")[number > 11] / ("ant", "bee")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(9000, size=(30, 25 + number, 5))
        np.save(folder / str(number), (pixels + 20_000 * (number % 2)).astype(np.uint16))
    data = f"--data.name folder --data.root {tmp_path}/fields --data.batch-size 6 --data.fit pad"
    train = f"train {SMOKE} --run.trackers --run.dir {tmp_path}/run {data}"
    assert main(f"{train} --data.channels 5 --data.bits 16".split()) == 0
    assert main(["export", f"{tmp_path}/run", "--format", "onnx"]) == 0
    assert "the same class for 8 of 8 images" in capsys.readouterr().out
    model = onnx.load(tmp_path / "run/export/model.onnx")
    images = model.graph.input[0].type.tensor_type
    assert images.elem_type == onnx.TensorProto.UINT16
    assert [size.dim_param or size.dim_value for size in images.shape.dim][3] == 5
    about = {entry.key: json.loads(entry.value) for entry in model.metadata_props}
    assert (about["channels"], about["bits"], about["fit"]) == (5, 16, "pad")


def test_an_ensemble_of_two_runs_is_one_onnx_file(exported, capsys):
    words = f"ensemble {exported}/run {exported}/other --dir {exported}/both"
    train = f"train {SMOKE} --run.trackers --seed 1 --run.dir {exported}/other"
    for command in (train, words, f"export {exported}/both --images 32 --format onnx pt2"):
        assert main(command.split()) == 0
    assert capsys.readouterr().out.count("the same class for 32 of 32 images") == 2
    one, both = (
        (exported / name).stat().st_size for name in ("model.onnx", "both/export/model.onnx")
    )
    assert both > 1.5 * one


def test_a_network_that_torch_cannot_write_as_onnx_is_refused_with_the_reason(monkeypatch):
    class Odd(nn.Module):
        def forward(self, x):
            return torch.linalg.matrix_exp(x)

    program = torch.export.export(Odd(), (torch.ones(2, 3, 3),))
    weights = {"scale": torch.ones(3)}
    names = "images", "logits"
    module = SimpleNamespace(program=program, names=names, about={}, state_dict=lambda: weights)
    with pytest.raises(UserError, match=r"as ONNX: \S.*; take --format pt2 safetensors"):
        formats.onnx(module)
    monkeypatch.setattr(formats, "LARGEST", 11)
    with pytest.raises(UserError, match="an ONNX file holds 2 GB"):
        formats.onnx(module)
