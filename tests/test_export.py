"""An exported model runs without the project that trained it, and predicts the same."""

import json
import re

import onnx
import pytest
from conftest import PROJECT, SMOKE, python
from PIL import Image

COMMAND = "import sys; from image_classifier.cli import main; "
COMMAND += "sys.exit(max(main(words.split()) for words in sys.argv[1:]))"
README = PROJECT / "src/image_classifier/tools/export/README.md"


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A folder with a run that is exported with preprocessing, and without in `raw`."""
    folder = tmp_path_factory.mktemp("export")
    export = "export runs/smoke --images 32"
    words = (f"{export} --out .", f"{export} --raw --out raw --format onnx pt2")
    train = f"train {SMOKE} --run.trackers"
    said = strictly(folder, PROJECT / "src", "-c", COMMAND, train, *words)
    assert said.count("the same class for 32 of 32 images") == 5
    return folder


def strictly(folder, packages, *words):
    """Run Python with warnings as errors, in a folder, with the packages of another."""
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": packages}
    return python("-W", "error", *words, folder=folder, **environment)


def test_the_examples_of_the_readme_run_without_the_project_and_agree(exported):
    photo = Image.effect_mandelbrot((90, 61), (-2, -1, 0.5, 1.3), 100).convert("RGB")
    photo.save(exported / "photo.png")
    turned = photo.transpose(Image.Transpose.ROTATE_90)  # as cameras save what is upright
    turned.getexif()[0x0112] = 6
    turned.save(exported / "turned.png", exif=turned.getexif())
    programs = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    first, second = (
        strictly(exported, "", "-c", program, "photo.png", "turned.png") for program in programs
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
