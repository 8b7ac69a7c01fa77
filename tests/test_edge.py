"""A real graph in fewer bits, and for OpenVINO, answers as the model that was trained."""

import re

import onnx
import pytest
from conftest import PROJECT, SMOKE, python
from image_classifier.cli import main
from image_classifier.tools.edge import edge, variants
from image_classifier.tools.export.formats import FORMATS
from PIL import Image

README = PROJECT / "src/image_classifier/tools/edge/README.md"
pytest.importorskip("openvino")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The folder `export` of a run, with all of its files."""
    run = tmp_path_factory.mktemp("edge") / "run"
    train = f"train {SMOKE} --run.trackers --run.dir {run}"
    words = f"export {run} --format onnx openvino --precision fp16 int8 --images 64"
    words += " --agreement 0.85"  # so short a training leaves ties
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(edge, "SECONDS", 0)
        for command in (train, words):
            assert main(command.split()) == 0
    return run / "export"


def test_all_files_are_written_and_say_what_they_are(exported):
    assert {path.name for path in exported.glob("[!.]*")} == {
        f"model{precision}.{suffix}"
        for precision in ("", ".fp16", ".int8")
        for suffix in ("onnx", "xml", "bin")
    }
    exact, half, whole = (onnx.load(exported / f"model{p}.onnx") for p in ("", ".fp16", ".int8"))
    about, *others = (
        {(entry.key, entry.value) for entry in model.metadata_props}
        for model in (exact, half, whole)
    )
    assert ("side", "32") in about
    assert all(about <= other for other in others)
    assert exact.graph.input == half.graph.input == whole.graph.input
    kinds = {weight.data_type for weight in half.graph.initializer}
    assert onnx.TensorProto.FLOAT16 in kinds
    quantized = {node.input[0] for node in whole.graph.node if node.op_type == "QuantizeLinear"}
    assert len(quantized) > 10


def test_the_example_of_the_readme_runs_without_the_project(exported):
    Image.effect_mandelbrot((90, 61), (-2, -1, 0.5, 1.3), 100).convert("RGB").save(
        exported / "photo.png"
    )
    (program,) = re.findall(r"^```py\nimport json.*?^```", README.read_text(), re.DOTALL | re.M)
    program = program.removeprefix("```py\n").removesuffix("```")
    said = python("-c", program, "photo.png", folder=exported, PYTHONPATH="")
    assert re.fullmatch(r"\d+\.\d\d% \w+\n", said)


def test_int8_that_is_calibrated_with_dark_images_is_refused(exported, monkeypatch, capsys):
    content = (exported / "model.onnx").read_bytes()
    made = lambda module: (content, variants.onnx_predict(content))  # noqa: ARG005, E731
    real = variants.training_images
    dark = lambda *given: (images // 30 for images in real(*given))  # noqa: E731
    monkeypatch.setitem(FORMATS, "onnx", made)
    monkeypatch.setattr(variants, "training_images", dark)
    run, folder = exported.parent, exported.parent / "refused"
    words = f"export {run} --format onnx --precision int8 --images 64 --out {folder}"
    assert main(words.split()) == 1
    assert "model.int8.onnx is not written: the same answer for " in capsys.readouterr().err
    assert [path.name for path in folder.glob("[!.]*")] == ["model.onnx"]
