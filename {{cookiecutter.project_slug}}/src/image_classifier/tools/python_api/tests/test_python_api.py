"""A program has a trained model, and trains one, by what the package offers it."""

import gc
import io
import json
import multiprocessing
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import changed, losses, on_deep, tiny, untrained_run, wait_for
from PIL import Image

from image_classifier import load as of_package
from image_classifier import train as train_module
from image_classifier.cli import main
from image_classifier.data import BadImageError, TrainData
from image_classifier.errors import FaultError, UserError
from image_classifier.runtime import distributed
from image_classifier.runtime.launch import BEGAN
from image_classifier.tools.python_api.api import (
    configure,
    fit,
    load,
)


@pytest.fixture(scope="module")
def run(photos, tmp_path_factory):
    config = tiny(tmp_path_factory.mktemp("python") / "run")
    return untrained_run(changed(config, augment__tta="flip"), photos)


@pytest.fixture(scope="module")
def paths(photos):
    return sorted(photos.glob("val/*/*.jpg"))


def written(run, photos, out, *words):
    """The rows of `predict --out`."""
    words = ("--out", str(out), "--device", "cpu", "--workers", "0", "--top-k", "2", *words)
    assert main(["predict", run, str(photos / "val"), *words]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def assert_same_rows(rows, others):
    for row, other in zip(rows, others, strict=True):
        found, expected = (
            [pair.pop("probability") for pair in [*one.pop("top"), one]]
            for one in (json.loads(json.dumps(row)), json.loads(json.dumps(other)))
        )
        assert found == pytest.approx(expected, abs=1e-6)
        assert [*row] == [*other]
        assert row["label"] == other["label"]
        assert [pair["label"] for pair in row["top"]] == [pair["label"] for pair in other["top"]]


def test_the_package_offers_what_the_tool_has_and_imports_no_torch_for_it():
    code = "from image_classifier import configure, fit, load; "
    code += "import sys; print(*sys.modules)"
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert "torch" not in said.split()
    assert of_package is load
    with pytest.raises(ImportError, match="loud"):
        from image_classifier import loud  # noqa: F401


def test_a_loaded_model_says_what_predict_writes(run, photos, paths, tmp_path):
    model = load(run, device="cpu")
    rows = model.predict(paths, batch_size=3)
    assert_same_rows(rows, written(run, photos, tmp_path / "o.jsonl"))
    assert [row["path"] for row in rows] == [str(path) for path in paths]
    assert model.predict(str(paths[0])) == model.predict(paths[:1])[0]
    for few in (1, 0):  # the label is one of them
        assert model.predict(iter(paths), top_k=few)[1]["top"] == rows[1]["top"][:1]
    assert model.predict([]) == []
    shares = model.probabilities(paths)
    assert shares.sum(1).tolist() == pytest.approx([1] * len(paths))
    assert shares.max(1).values.tolist() == pytest.approx([row["probability"] for row in rows])
    with torch.inference_mode():  # a caller's own
        assert torch.equal(model.probabilities(paths), shares)
    assert model.classes == ("ant", "bee")
    assert repr(model).startswith("<Classifier of 2 classes: ")


def test_one_that_abstains_or_knows_several_labels_says_so(photos, config, tmp_path):
    pytest.importorskip("image_classifier.tools.calibration")
    several = changed(config, model__task="multi-label", run__dir=str(tmp_path / "several"))
    for number, (own, limits) in enumerate([(config, (0.6,)), (several, (0.4, 0.6))]):
        run = untrained_run(own, photos, 2.0, limits)
        rows = written(run, photos, tmp_path / f"{number}.jsonl")
        found = load(run).predict([row["path"] for row in rows])
        assert_same_rows(found, rows)
        for name in ("decision", "labels"):
            assert [row.get(name) for row in found] == [row.get(name) for row in rows]
        assert ("decision" in rows[0], "labels" in rows[0]) == (number == 0, number == 1)


def test_an_image_may_be_a_file_its_content_or_pixels(run, paths):
    model = load(run)
    pixels = np.asarray(Image.open(paths[0]))  # which is not writable
    tensor = torch.tensor(pixels).permute(2, 0, 1)
    expected = model.probabilities(str(paths[0]))
    content = paths[0].read_bytes()
    with warnings.catch_warnings(action="error"):
        for image in (content, bytearray(content), Image.open(paths[0]), pixels, tensor):
            assert torch.equal(model.probabilities(image), expected)
            assert model.predict(image)["path"] == ""
    with paths[0].open("rb") as file:
        assert torch.equal(model.probabilities(file), expected)
    uploads = [io.BytesIO(path.read_bytes()) for path in paths[:2]]
    assert [row["label"] for row in model.predict(uploads)] == [
        row["label"] for row in model.predict(paths[:2])
    ]
    for several in (pixels[None].repeat(3, axis=0), tensor.expand(3, -1, -1, -1)):
        found = model.probabilities(several, batch_size=2)
        torch.testing.assert_close(found, expected.expand(3, -1))
        assert len(model.predict(several)) == 3
    gray = Image.open(paths[0]).convert("L")
    assert torch.equal(model.probabilities(gray), model.probabilities(np.asarray(gray)))


def test_images_of_other_channels_and_bits_are_taken_as_training_takes_them(config, satellite):
    config = changed(on_deep(config, satellite, 5, data__workers=0), epochs=1, data__limit=8)
    fit(config)
    model = load(config.run.dir)
    deep = torch.arange(5 * 9 * 9).to(torch.uint16).view(5, 9, 9)
    assert model.predict(deep)["label"] in model.classes
    with pytest.raises(UserError, match="it has 3 channels, not 5"):
        model.predict(deep[:3])
    path = next(satellite.glob("val/*/*.npy"))
    assert torch.equal(model.probabilities(path.read_bytes()), model.probabilities(path))


def test_one_that_cannot_be_read_is_an_error_and_among_others_a_row(run, paths, tmp_path):
    model = load(run)
    cut = paths[0].read_bytes()[:900]
    rows = model.predict([paths[0], tmp_path / "gone.jpg", cut, b"", paths[1]])
    errors = [row["error"] for row in rows]
    assert errors[::4] == [None, None]
    assert errors[1] == "No such file or directory"
    assert "truncated" in errors[2]
    assert errors[3].startswith("not a JPEG")
    assert [row["label"] is None for row in rows] == [False, True, True, True, False]
    with pytest.raises(BadImageError, match=r"cannot read image '.*gone.jpg': No such file"):
        model.predict(tmp_path / "gone.jpg")
    for ask in (model.probabilities, model.features):
        with pytest.raises(BadImageError, match="cannot read image 'bytes'"):
            ask([paths[0], cut])
        with pytest.raises(UserError, match="batch_size 0 is not 1 or more"):
            ask(paths, batch_size=0)
    damaged = Image.open(io.BytesIO(cut))
    assert "truncated" in model.predict([damaged, paths[0]])[0]["error"]


def test_a_machine_without_memory_makes_no_image_a_damaged_one(run, paths, monkeypatch):
    from image_classifier.tools.python_api import classifier

    monkeypatch.setattr(classifier, "decode_image", Mock(side_effect=FaultError("no memory")))
    with pytest.raises(FaultError, match="no memory"):
        load(run).predict([paths[0], b""])


EMPTY = np.zeros((0, 9, 3), np.uint8)
FOUR = np.zeros((9, 9, 4), np.uint8)


@pytest.mark.parametrize("image", [None, 7, torch.rand(3, 9, 9), FOUR, EMPTY])
def test_what_is_no_image_is_refused_with_what_would_be_one(run, image):
    with pytest.raises(UserError, match=r"an image should be PIL or uint8 \(height, width, 3\)"):
        load(run).predict([image])


def test_a_run_or_a_device_that_is_not_there_is_refused(tmp_path, run):
    with pytest.raises(UserError, match="there is no checkpoint"):
        load(tmp_path / "gone")
    for device in ("foo", "foo:1", "cpu:x"):
        with pytest.raises(UserError, match=f"device '{device}' is none of auto, cpu"):
            load(run, device=device)
    with pytest.raises(UserError, match="device 'cpu:1' is not there"):
        load(run, device="cpu:1")
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match=r"--compute\.device cuda: "):
            load(run, device="cuda")


def test_of_several_gpus_only_the_one_that_is_named_is_used(monkeypatch):
    # It imports the tool `predict`, which may be deleted.
    from image_classifier.tools.python_api.classifier import (
        open_device,
    )

    current = []
    monkeypatch.setattr(distributed, "find_accelerator", lambda: ("cuda", ""))
    monkeypatch.setattr(distributed, "why_too_old", lambda _: "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    found = [open_device(name) for name in ("cuda:3", "cuda", "auto")]
    assert found == current == [torch.device("cuda", number) for number in (3, 0, 0)]
    with pytest.raises(UserError, match="device 'cuda:4' is not there"):
        open_device("cuda:4")
    monkeypatch.setattr(distributed, "find_accelerator", lambda: ("cpu", "no driver"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match="no driver"):
        open_device("cuda:4")


def test_runs_are_loaded_on_the_device_that_is_asked_for(monkeypatch):
    # As above.
    from image_classifier.tools.python_api import classifier

    open_device = Mock(return_value=torch.device("mps"))
    one = Mock()
    several = Mock()
    doubles = {"open_device": open_device, "load_model": one, "place_model": several}
    for name, double in (doubles | {"need_tool": Mock()}).items():
        monkeypatch.setattr(classifier, name, double)
    load("a", device="mps")
    load("a", "b", device="mps")
    assert [call.args for call in open_device.call_args_list] == [("mps",)] * 2
    for placed in (one, several):
        _, compute, world = placed.call_args.args
        assert (compute.device, world.device.type) == ("mps", "mps")


def test_features_are_the_embeddings_of_predict(run, photos, paths, tmp_path, monkeypatch):
    file = tmp_path / "features.npy"
    written(run, photos, tmp_path / "o.jsonl", "--embeddings", str(file))
    model = load(run)
    copied = Mock(side_effect=AssertionError("weights should be in memory once"))
    monkeypatch.setattr(torch.nn.Parameter, "__deepcopy__", copied)
    found = model.features(paths, batch_size=2)
    torch.testing.assert_close(found, torch.from_numpy(np.load(file)))


def test_several_runs_are_one_model_of_their_mean(photos, paths, config, tmp_path):
    pytest.importorskip("image_classifier.tools.ensemble")
    runs = [
        untrained_run(changed(config, run__dir=str(tmp_path / name)), photos, temperature)
        for name, temperature in (("one", 1.0), ("two", 3.0))
    ]
    both = load(*runs)
    expected = sum(load(run).probabilities(paths) for run in runs) / 2
    torch.testing.assert_close(both.probabilities(paths), expected)
    with pytest.raises(UserError, match="an ensemble has no features"):
        both.features(paths)
    with pytest.raises(UserError, match="is the same file as"):
        load(runs[0], runs[0])


def test_threads_may_share_a_model(run, paths):
    model = load(run)
    with ThreadPoolExecutor(4) as pool:
        for call in (model.probabilities, model.features):
            expected = call(paths)
            for found in pool.map(call, [paths] * 20):
                assert torch.equal(found, expected)


def test_a_config_is_that_of_the_same_words_on_the_command_line():
    config = configure("folder", {"data.root": "my photos", "epochs": 10, "augment.tta": "flip"})
    assert config.run.dir == "runs/folder"
    assert (config.data.root, config.epochs, config.augment.tta) == ("my photos", 10, "flip")
    assert configure("folder", {"epochs": 10}).optim.warmup_epochs == 0.3  # of 3 in 100
    for options, said in (
        ({"data.rot": "x"}, "there is no --data.rot; did you mean --data.root"),
        ({"epochs": "many"}, "epochs"),
        ({"augment.min_scale": 7}, "--augment.min-scale 7 is not in 0.01 .. 1"),
        ({"epochs": None}, "'epochs' is no option, or has no value"),
        ({"help": True}, "'help' is no option"),
    ):
        with pytest.raises(UserError, match=said):
            configure("folder", options)
    with pytest.raises(UserError, match=r"no preset 'foder'; there are: .*did you mean folder"):
        configure("foder")


def test_training_twice_in_a_program_is_that_of_the_command_and_leaves_nothing(config, tmp_path):
    config = changed(config, data__where="stream", data__workers=1, data__limit=32, epochs=1)
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    threads = threading.active_count()
    found = []
    for name in ("one", "two"):
        again = changed(config, run__dir=str(tmp_path / name))
        scores = fit(again)
        found.append(losses(again.run.dir))
        gc.collect()  # which ends the thread of a queue that nobody has any more
        wait_for(lambda: threading.active_count() == threads)
        assert not multiprocessing.active_children()
        assert {n: signal.getsignal(n) for n in before} == before
        assert load(again.run.dir).classes == scores.predictions.source.classes
    assert found[0] == found[1] != []


def test_a_run_that_is_over_keeps_no_images_in_memory(config, monkeypatch):
    kept = []

    def open_data(*words):
        kept.append(weakref.ref(data := TrainData(*words)))
        return data

    monkeypatch.setattr(train_module, "TrainData", open_data)
    gc.disable()  # one that comes by itself may come late
    try:
        fit(changed(config, data__limit=32, epochs=1))
        assert [data() for data in kept] == [None]
    finally:
        gc.enable()


def test_time_limits_are_of_this_run_and_not_of_the_program(config, monkeypatch):
    monkeypatch.setenv(BEGAN, str(time.monotonic() - 3600))
    fit(changed(config, run__max_minutes=30, data__limit=32, epochs=1))


def test_a_run_out_of_memory_goes_on_with_half_the_micro_batch(config, monkeypatch, capsys):
    config = changed(config, data__limit=32, epochs=1, run__fresh=True)
    own_step = train_module.train_step

    def step(model, batch, loss_fn, precision, micro_batch_size):
        if micro_batch_size > 4:
            raise torch.OutOfMemoryError
        return own_step(model, batch, loss_fn, precision, micro_batch_size)

    monkeypatch.setattr(train_module, "train_step", step)
    fit(config)
    assert "started again from the last save with 4" in capsys.readouterr().out
    assert Path(config.run.dir, "checkpoints", "best.pt").exists()


@pytest.mark.parametrize("knobs", [{"data__test_size": 48}, {"data__fit": "pad"}], ids=str)
def test_images_become_squares_as_those_of_predict_do(knobs, config, photos, tmp_path):
    run = untrained_run(changed(config, **knobs), photos)
    rows = written(run, photos, tmp_path / "o.jsonl")
    assert_same_rows(load(run).predict([row["path"] for row in rows]), rows)
