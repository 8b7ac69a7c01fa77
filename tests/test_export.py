"""A trained model runs without the project that trained it, and says the same."""

import json
import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import PROJECT, python
from PIL import Image

COMMAND = "import sys; from image_classifier.cli import main; "
COMMAND += "sys.exit(max(main(words.split()) for words in sys.argv[1:]))"
SMOKE = "train smoke --run.trackers --epochs 1 --optim.warmup-epochs 0 --data.limit 192"
SURE = "train smoke --run.trackers --epochs 3 --optim.warmup-epochs 0 --run.dir runs/sure"
SURE += " --data.name folder --data.root colours --data.batch-size 8"


def strictly(*words: str, folder: Path, **environment: str) -> str:
    """Run Python with warnings as errors; what it printed."""
    return python("-W", "error", *words, folder=folder, OMP_NUM_THREADS="1", **environment)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, exported from pixels and from normalised images, and two photographs.

    And with another, whose model is sure, exported in 8 bits.
    """
    folder = tmp_path_factory.mktemp("export")
    noise = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    photo = Image.fromarray(noise).resize((90, 61), Image.Resampling.BICUBIC)
    photo.save(folder / "photo.png")
    turned = photo.transpose(Image.Transpose.ROTATE_90)  # as cameras save what is upright
    exif = Image.Exif()
    exif[0x0112] = 6
    turned.save(folder / "turned.png", exif=exif)
    export = "export runs/smoke --images 32"
    words = (SMOKE, export, f"{export} --raw --out raw --format onnx pt2")
    write_colours(folder / "colours")
    words += (SURE, "export runs/sure --format onnx --int8")
    said = strictly("-c", COMMAND, *words, folder=folder, PYTHONPATH=str(PROJECT / "src"))
    assert said.count("the same class for 32 of 32 images") == 5
    (folder / "said.txt").write_text(said)
    return folder


def write_colours(root: Path) -> None:
    """Reddish and bluish images, which any model tells apart."""
    chance = np.random.default_rng(0)
    for number in range(80):
        name = ("red", "blue")[number % 2]
        path = root / ("train", "val")[number >= 64] / name / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = chance.integers(0, 100, (32, 32, 3), dtype=np.uint8)
        pixels[..., 2 * (name == "blue")] += 155
        Image.fromarray(pixels).save(path)


def answers(folder: Path, program: str) -> list[tuple[float, str]]:
    """What an example says of both photographs: percentages and classes, best first."""
    said = strictly(program, "photo.png", "turned.png", folder=folder, PYTHONPATH="")
    lines = re.findall(r"^ *([0-9.]+)%  '(\w+)'$", said, re.MULTILINE)
    return [(float(percentage), name) for percentage, name in lines]


def test_examples_need_no_project_and_agree(exported: Path) -> None:
    first = answers(exported, "runs/smoke/export/example_onnx.py")
    assert len(first) == 10
    assert len({name for _, name in first[:5]}) == 5
    assert first[:5] == first[5:]  # the turned one is upright again
    assert first == answers(exported, "runs/smoke/export/example_pt2.py")
    # Pillow's cut of the middle may lie half a pixel beside ours.
    for program in ("raw/example_onnx.py", "raw/example_pt2.py"):
        raw = dict(map(reversed, answers(exported, program)[:5]))
        for percentage, name in first[:3]:
            assert raw[name] == pytest.approx(percentage, abs=2)


def test_the_file_of_onnx_is_whole_and_says_what_it_is(exported: Path) -> None:
    for folder, names, sizes in (
        ("runs/smoke/export", ("images", "probabilities"), ["batch", "height", "width", 3]),
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
        assert len(about["classes"]) == 10
        assert about["side"] == 32
        for file in path.parent.iterdir():  # they go to others
            assert not re.search(
                rb"/site-packages|\.py\", line|" + str(exported).encode(), file.read_bytes()
            )
        files = {"model.onnx", "model.pt2", "example_onnx.py", "example_pt2.py"}
        assert {file.name for file in path.parent.iterdir()} >= files


def test_an_int8_file_is_smaller_and_right_as_often(exported: Path) -> None:
    said = (exported / "said.txt").read_text()
    assert "top-1 100.00% of 16 images, 100.00% in float32" in said
    small, large = (exported / "runs/sure/export" / f"model{n}.onnx" for n in (".int8", ""))
    assert small.stat().st_size < large.stat().st_size / 2
    layers = {node.op_type for node in onnx.load(small).graph.node}
    assert {"QuantizeLinear", "DequantizeLinear"} <= layers
