"""Files of fewer bits answer as the model does, or are not written.

The template's tests make them of a real graph, which takes seconds; here graphs are tiny.
"""

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import untrained_run

from image_classifier.checkpoints import load_model
from image_classifier.cli import main
from image_classifier.config import ComputeConfig
from image_classifier.data import (
    LEFT_OUT,
    BadImageError,
    open_dataset,
)
from image_classifier.errors import FaultError, UserError
from image_classifier.runtime.distributed import World

TOOLS = "image_classifier.tools"
exporting = pytest.importorskip(f"{TOOLS}.export.export")
onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
formats = pytest.importorskip(f"{TOOLS}.export.formats")
edge = pytest.importorskip(f"{TOOLS}.edge.edge")
exports = pytest.importorskip(f"{TOOLS}.edge.exports")
variants = pytest.importorskip(f"{TOOLS}.edge.variants")


@pytest.fixture
def run(config, photos):
    """A run folder with an untrained model whose predictions are confident."""
    return untrained_run(config, photos)


@pytest.fixture
def exported(run, monkeypatch):
    """`export` with files that hold words, and predict as the model does after a change."""
    changes = {b"exact": lambda images: images, b"half": torch.clone, b"int8": torch.clone}
    modules = []

    def exact(module):
        modules.append(module)
        return b"exact", module

    monkeypatch.setattr(formats, "check_libraries", lambda: None)
    monkeypatch.setattr(exporting, "check_libraries", lambda: None)
    monkeypatch.setitem(formats.FORMATS, "onnx", exact)
    monkeypatch.setattr(edge, "half_onnx", lambda *_: b"half")
    monkeypatch.setattr(edge, "int8_onnx", lambda *_: b"int8")
    predict = lambda content: lambda images: modules[0](changes[content](images))  # noqa: E731
    monkeypatch.setattr(edge, "onnx_predict", predict)
    monkeypatch.setattr(edge, "SECONDS", 0)

    def export(*words, **others):
        changes.update({name.encode(): change for name, change in others.items()})
        return main(["export", run, "--format", "onnx", *words])

    return export


def names(run):
    """The files that were exported, in order."""
    return sorted(path.name for path in Path(run, "export").glob("[!.]*"))


def test_files_of_fewer_bits_lie_beside_the_exact_one_and_a_table_compares_all(
    exported, run, capsys
):
    assert exported("--precision", "fp16", "int8") == 0
    assert names(run) == ["model.fp16.onnx", "model.int8.onnx", "model.onnx"]
    *_, head, exact, half, whole = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["file", "MB"]
    for row, name in ((exact, "model.onnx"), (half, "model.fp16.onnx"), (whole, "model.int8.onnx")):
        found, _, _, change, _, margin, same, one, batch = row.split()
        assert (found, change, same) == (name, "+0.0%", "4/4")
        assert margin != "0.0%"  # of four images, none that changed is no certainty
        assert float(one.replace(",", "")) > 0
        assert float(batch.replace(",", "")) > 0


def test_without_fewer_bits_export_says_and_writes_what_it_did_before(exported, run, capsys):
    assert exported() == 0
    assert names(run) == ["model.onnx"]
    assert "images/s" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "change",
    [
        lambda images: 255 - images,
        lambda images: images[:1].expand(images.shape),  # one image at a time only
        lambda images: images.roll(len(images) // 2, 0),  # batches in another order
    ],
    ids=["negative", "first of a batch", "order of a batch"],
)
def test_a_file_that_answers_otherwise_is_not_written(change, exported, run, capsys):
    earlier = Path(run, "export", "model.int8.onnx")
    earlier.parent.mkdir(exist_ok=True)
    earlier.write_bytes(b"of other weights")
    assert exported("--precision", "int8", "fp16", int8=change) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("model.int8.onnx is not written: the same answer for ")
    assert names(run) == ["model.onnx"]


def test_of_two_files_that_are_refused_neither_is_left(exported, run, monkeypatch):
    parts = {"model.int8.bin": b"weights", "model.int8.xml": b"graph"}
    unknown = lambda images: torch.full((len(images), 2), np.nan)  # noqa: E731
    monkeypatch.setattr(edge, "variants", lambda *_: [(parts, unknown)])
    Path(run, "export").mkdir()
    for name in parts:
        Path(run, "export", name).write_bytes(b"of other weights")
    assert exported("--precision", "int8") == 1
    assert names(run) == ["model.onnx"]


def test_a_graph_of_openvino_that_is_less_exact_than_the_others_is_not_written(
    exported, run, monkeypatch, capsys
):
    parts = {"model.bin": b"weights", "model.xml": b"graph"}

    def near(_options, _trained, module, _exact):  # the answers are the same
        return [(parts, lambda images: module(images) + 0.002)]

    monkeypatch.setattr(edge, "variants", near)
    assert exported("--precision", "fp16") == 1
    assert "its predictions differ" in capsys.readouterr().err
    assert names(run) == ["model.onnx"]
    assert exported("--precision", "fp16", "--tolerance", "0.01") == 0
    assert names(run) == ["model.bin", "model.onnx", "model.xml"]


def test_each_precision_is_written_in_the_formats_that_are_asked_for(monkeypatch):
    monkeypatch.setattr(exports, "find_spec", lambda _: True)
    monkeypatch.setattr(edge, "half_onnx", lambda *_: b"half")
    monkeypatch.setattr(edge, "int8_onnx", lambda *_: b"int8")
    monkeypatch.setattr(edge, "onnx_predict", lambda _: None)
    monkeypatch.setattr(edge, "openvino", lambda content, _, stem: ({f"{stem}.xml": content}, None))

    def made(*names):
        options = exports.EdgeOptions(run="", format=names, precision=("int8", "fp16"))
        found = {}
        for contents, _ in edge.variants(options, None, None, (b"exact", None)):
            found |= contents
        return found

    of_onnx = {"model.int8.onnx": b"int8", "model.fp16.onnx": b"half"}
    others = {"model.xml": b"exact", "model.int8.xml": b"int8", "model.fp16.xml": b"half"}
    assert made("onnx", "pt2") == of_onnx
    assert made("pt2", "openvino") == others
    assert made("onnx", "openvino") == of_onnx | others


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_graph_is_never_beside_the_weights_of_another(is_killed, tmp_path, monkeypatch):
    for name in ("model.bin", "model.xml"):
        (tmp_path / name).write_bytes(b"old")
    replaced = Path.replace

    def replace_one(path, target):
        replaced(path, target)
        if is_killed:
            raise KeyboardInterrupt
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", replace_one)
    with pytest.raises(KeyboardInterrupt if is_killed else FaultError):
        edge.write_parts({"model.bin": b"new", "model.xml": b"new"}, tmp_path)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"new"]


def test_how_many_answers_may_change_is_an_option(exported, run, capsys):
    assert (
        exported("--precision", "int8", "--agreement", "0", int8=lambda images: 255 - images) == 0
    )
    assert names(run) == ["model.int8.onnx", "model.onnx"]
    assert " 4/4" not in capsys.readouterr().out.splitlines()[-1]
    assert exported("--precision", "fp16", "--agreement", "1") == 0


def test_the_change_is_that_from_the_model_to_the_file():
    right, wrong = torch.tensor([0.9, 0.1]), torch.tensor([0.2, 0.8])
    reference = exporting.Reference(
        read=lambda number: torch.full((1, 1), number),
        squares=[torch.full((1, 1), n) for n in range(4)],
        probabilities=torch.stack((right, right, right, wrong)),
        names=[""] * 4,
        labels=torch.tensor([0, 0, 0, LEFT_OUT]),
        to_probabilities=lambda found: found,
        to_answers=lambda shares: shares.argmax(1)[:, None],
    )

    def predict(images):
        return torch.stack([right if number < 2 else wrong for number in images[:, 0]])

    found = edge.compare(predict, reference)
    assert (found.same, found.count) == (3, 4)
    assert (found.accuracy, found.change.mean) == pytest.approx((2 / 3, -1 / 3))
    reach = 1.96 * 0.6 / 5**0.5  # of one image that is lost, and half a one in each of four cells
    assert found.change_text == f"-33.3% ± {reach:.1%}"
    assert edge.compare(lambda images: torch.full((len(images), 2), np.nan), reference).same == 0
    unknown = reference._replace(labels=torch.full((4,), LEFT_OUT))
    assert "nan%" in str(edge.compare(predict, unknown))  # and no traceback


def test_the_table_has_images_per_second_of_one_and_of_a_batch(monkeypatch, capsys):
    now = []
    monkeypatch.setattr(edge.time, "perf_counter", lambda: float(sum(now)))
    monkeypatch.setattr(edge, "SECONDS", 3)
    answers = edge.Comparison(4, 4, 1.0, edge.by_images(0, 0, 4), 0.0)
    row = edge.Row("model.onnx", 2_000_000, lambda images: now.append(len(images) ** 0.5), answers)
    squares = [torch.zeros(1, 2, 2, 3)] * 4
    edge.print_table([row], type("Reference", (), {"squares": squares}))
    found = capsys.readouterr().out.splitlines()[-1].split()
    assert (found[1], *found[-2:]) == ("2.0", "1.0", f"{edge.BATCH**0.5:.1f}")


GRAPH = """
<ir_version: 10, opset_import: ["" : 18]>
tiny (uint8[batch, 32, 32, 3] images) => (float[batch, 5] probabilities) {
  pixels = Cast <to = 1> (images)
  planes = Transpose <perm = [0, 3, 1, 2]> (pixels)
  product = MatMul (planes, planes)
  normal = Mul (planes, scale)
  features = Conv (normal, filters)
  active = Relu (features)
  pooled = GlobalAveragePool (active)
  flat = Flatten (pooled)
  logits = Gemm (flat, matrix)
  probabilities = Softmax (logits)
}"""


@pytest.fixture
def graph():
    """A graph that prepares images, and has a network of two layers."""
    model = onnx.parser.parse_model(GRAPH)
    draw = np.random.default_rng(0).normal
    weights = {"filters": draw(0, 0.3, (8, 3, 3, 3)), "matrix": draw(0, 0.3, (8, 5))}
    for name, values in (weights | {"scale": 1 / 255}).items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(values), name))
    for node in model.graph.node:
        node.name = node.op_type
    return model


def test_only_the_network_is_quantized(graph):
    outside = variants.outside_network(graph.graph)
    assert outside == ["Cast", "Transpose", "MatMul", "Mul", "Softmax"]


def test_a_constant_that_layers_share_is_copied_by_a_name_that_is_free(graph, monkeypatch):
    norms = """
  active = InstanceNormalization (features, ones, val_1)
  val_10 = InstanceNormalization (active, ones, val_1)
  pooled = GlobalAveragePool (val_10)"""
    text = GRAPH.replace("\n  active = Relu (features)", "").replace(
        "\n  pooled = GlobalAveragePool (active)", norms
    )
    shared = onnx.parser.parse_model(text)
    constants = {"ones": np.ones(8), "val_1": np.zeros(8)}
    shared.graph.initializer.extend(graph.graph.initializer)
    for name, values in constants.items():
        shared.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(values), name))
    for number, node in enumerate(shared.graph.node):
        node.name = f"node{number}"
    images = torch.zeros(1, 32, 32, 3, dtype=torch.uint8)
    monkeypatch.setattr(variants, "training_images", lambda *_: iter([images]))
    options = exports.EdgeOptions(run="", precision=("int8",))
    content = variants.int8_onnx(shared.SerializeToString(), None, options)
    assert variants.onnx_predict(content)(images).shape == (1, 5)


def unfused(content, images):
    """What a graph predicts, node by node: int8 kernels of CPUs without VNNI saturate."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(content, options)
    return torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


@pytest.fixture
def quantized(graph, monkeypatch):
    """How far probabilities of the graph in int8 are from it, by the images of calibration."""
    images = torch.randint(0, 256, (16, 32, 32, 3), generator=torch.Generator()).byte()
    images = (images * torch.linspace(0.1, 1, 16).view(-1, 1, 1, 1)).byte()
    exact = graph.SerializeToString()

    def distance(calibration, is_symmetric=False):
        options = exports.EdgeOptions(run="", precision=("int8",), symmetric=is_symmetric)
        monkeypatch.setattr(
            variants, "training_images", lambda *_: iter(calibration(images).split(1))
        )
        content = variants.int8_onnx(exact, None, options)
        weights = onnx.load_model_from_string(content).graph.initializer
        assert [8] in [list(w.dims) for w in weights if w.name.endswith("_scale")]  # per channel
        zeros = [w for w in weights if w.name.endswith("_zero_point")]
        assert (onnx.TensorProto.UINT8 in {zero.data_type for zero in zeros}) != is_symmetric
        assert any(onnx.numpy_helper.to_array(zero).any() for zero in zeros) != is_symmetric
        pairs = (unfused(one, images) for one in (exact, content))
        return torch.dist(*pairs, p=torch.inf).item()

    return distance


def test_int8_is_near_where_it_is_calibrated_with_images_like_those_it_meets(quantized):
    assert 0 < quantized(lambda images: images) < 0.005
    assert 0 < quantized(lambda images: images, is_symmetric=True) < 0.005
    assert quantized(lambda images: images // 20) > 0.05  # darker ones


def test_openvino_predicts_from_the_two_files_alone(graph):
    pytest.importorskip("openvino")
    images = torch.randint(0, 256, (3, 32, 32, 3)).byte()
    module = type("Module", (), {"about": {"classes": ["ant", "bee"]}})
    contents, predict = variants.openvino(graph.SerializeToString(), module, "model.int8")
    assert list(contents) == ["model.int8.bin", "model.int8.xml"]
    assert b"[&quot;ant&quot;, &quot;bee&quot;]" in contents["model.int8.xml"]
    exact = variants.onnx_predict(graph.SerializeToString())
    torch.testing.assert_close(predict(images), exact(images), rtol=0, atol=1e-5)


def test_a_network_of_float16_takes_and_gives_float32():
    network = torch.nn.Linear(3, 2)
    half = variants.Half(network)
    images = torch.rand(5, 3)
    assert half(images).dtype == network.weight.dtype == torch.float32
    torch.testing.assert_close(half(images), network(images), rtol=0, atol=2e-3)
    assert not torch.equal(half(images), network(images))


@pytest.mark.parametrize("is_raw", [False, True])
def test_a_graph_of_float16_takes_and_gives_what_the_exact_one_does(is_raw, run, monkeypatch):
    trained = load_model(run, ComputeConfig(), World(torch.device("cpu")))
    monkeypatch.setitem(variants.FORMATS, "onnx", lambda module: (module, None))
    module = variants.half_onnx(trained, is_raw)
    assert (module.is_raw, module.training) == (is_raw, False)


def test_a_mistake_is_answered_in_one_line(run, refusal, monkeypatch):
    monkeypatch.setattr(exports, "find_spec", lambda _: None)
    for words, expected in {
        "--precision int4": "int4",
        "--format pt2 --precision int8": "--precision is for --format onnx and openvino",
        "--format openvino": "--format openvino needs onnx, onnxruntime, onnxscript, openvino: ",
        "--agreement 2": "--agreement 2 is not in 0",
        "--symmetric --precision fp16": "--symmetric needs --precision int8",
    }.items():
        assert expected in refusal("export", run, *words.split())
    assert not Path(run, "export").exists()


def test_images_that_cannot_be_read_set_no_ranges(graph, run, monkeypatch):
    trained = load_model(run, ComputeConfig(), World(torch.device("cpu")))
    source = open_dataset(trained.config.data, "train")
    unreadable = Mock(side_effect=BadImageError("a.jpg", "truncated"))
    broken = replace(source, paths=None, reader=unreadable)
    monkeypatch.setattr(variants, "open_dataset", lambda *_: broken)
    options = exports.EdgeOptions(run=run, precision=("int8",), raw=True)
    with pytest.raises(UserError, match="no training image can be read"):
        variants.int8_onnx(graph.SerializeToString(), trained, options)


def test_what_is_measured_are_the_images_of_training_while_they_are_there(
    run, tmp_path, monkeypatch
):
    trained = load_model(run, ComputeConfig(), World(torch.device("cpu")))
    options = exports.EdgeOptions(run=run, root=str(tmp_path), calibration_images=3)
    images = [*variants.training_images(trained, options)]
    assert [(len(image), image.dtype) for image in images] == [(1, torch.uint8)] * 3
    (raw, *_) = variants.training_images(trained, replace(options, raw=True))
    torch.testing.assert_close(raw, trained.normalize(images[0].permute(0, 3, 1, 2)))
    data = replace(trained.config.data, test_size=48)
    larger = replace(trained, config=replace(trained.config, data=data))
    asked = []

    def weighted(data, split):  # one of the twelve, which is not one of the three
        asked.append((data.image_size, split))
        return replace(open_dataset(data, split), weights=torch.eye(12)[11])

    monkeypatch.setattr(variants, "open_dataset", weighted)
    assert next(variants.training_images(larger, options)).shape[1] == 48
    assert asked[0] == (48, "train")
    data = replace(trained.config.data, fit="pad")
    padded = replace(trained, config=replace(trained.config, data=data))
    side = next(variants.training_images(padded, options))[0, :, 0]  # of an image that is high
    assert (side == side[0]).all()
    data = replace(trained.config.data, root="gone")
    moved = replace(trained, config=replace(trained.config, data=data))
    with pytest.raises(UserError, match=str(tmp_path)):
        [*variants.training_images(moved, options)]
