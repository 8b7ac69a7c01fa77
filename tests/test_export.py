"""An exported model runs without the project that trained it, and predicts the same."""

import json
import re

import numpy as np
import onnx
import pytest
from conftest import PROJECT, python
from PIL import Image

COMMAND = "import sys; from image_classifier.cli import main; "
COMMAND += "sys.exit(max(main(words.split()) for words in sys.argv[1:]))"
SMOKE = "train smoke --run.trackers --epochs 1 --optim.warmup-epochs 0 --data.limit 192"
EXAMPLES = PROJECT / "src/image_classifier/tools/export/README.md"


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A folder with a run, exported with and without preprocessing, and the README's examples."""
    folder = tmp_path_factory.mktemp("export")
    noise = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    photo = Image.fromarray(noise).resize((90, 61), Image.Resampling.BICUBIC)
    photo.save(folder / "photo.png")
    turned = photo.transpose(Image.Transpose.ROTATE_90)  # as cameras save what is upright
    exif = Image.Exif()
    exif[0x0112] = 6
    turned.save(folder / "turned.png", exif=exif)
    export = "export runs/smoke --images 32"
    words = (SMOKE, f"{export} --out .", f"{export} --raw --out raw --format onnx pt2")
    said = strictly("-c", COMMAND, *words, folder=folder, PYTHONPATH=str(PROJECT / "src"))
    assert said.count("the same class for 32 of 32 images") == 5
    programs = re.findall(r"^```python\n(.*?)^```", EXAMPLES.read_text(), re.DOTALL | re.MULTILINE)
    for name, program in zip(("onnx", "pt2"), programs, strict=True):
        (folder / f"{name}_example.py").write_text(program)
    return folder


def strictly(*words, folder, **environment):
    """Run Python with warnings as errors; what it printed."""
    return python("-W", "error", *words, folder=folder, OMP_NUM_THREADS="1", **environment)


def test_the_examples_of_the_readme_run_without_the_project_and_agree(exported):
    first, second = (
        strictly(f"{name}_example.py", "photo.png", "turned.png", folder=exported, PYTHONPATH="")
        for name in ("onnx", "pt2")
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
        assert len(about["classes"]) == 10
        assert about["side"] == 32
        for file in path.parent.glob("model.*"):  # no path of this machine goes to others
            assert not re.search(
                rb"/site-packages|\.py\", line|" + str(exported).encode(), file.read_bytes()
            )
