"""What is exported answers as the model does, or is not there.

The graphs themselves are made and run by the tests of the template, as that takes seconds.
"""

import fcntl
import json
import os
from pathlib import Path

import pytest
import torch
from conftest import changed
from safetensors import safe_open
from torch import Tensor

from image_classifier.augment import VIEWS, shift_and_flip
from image_classifier.cli import main
from image_classifier.config import Config, FaultError, flatten
from image_classifier.data.crops import centre_crop
from image_classifier.models import build_model
from image_classifier.tools.export import export as exporting
from image_classifier.tools.export.agreement import compare_scores
from image_classifier.tools.export.formats import (
    Answer,
    Portable,
    onnx_graph,
)
from image_classifier.tools.export.formats.examples import (
    START,
    example,
)
from image_classifier.tools.export.pixels import (
    middle_square,
    moved,
)


@pytest.fixture
def run(config: Config, photos: Path) -> str:
    """A run folder with a model that was never trained, and answers as if it were sure."""
    config = changed(
        config, data__name="folder", data__root=str(photos), data__limit=0, augment__tta="shift"
    )
    torch.manual_seed(0)
    model = build_model(config.model, 2, config.data.image_size)
    torch.nn.init.normal_(model.head.weight)
    saved = {
        "state": {
            "model": model.state_dict(),
            "ema": None,
            "step": 7,
            "best_top1": 0.5,
            "best_step": 7,
            "optimizer": {"state": {}, "param_groups": []},
            "scaler": {},
        },
        "config": flatten(config),
        "classes": ["ant", "bee"],
        "mean": [0.5, 0.4, 0.3],
        "std": [0.2, 0.3, 0.25],
        "fingerprint": "",
        "report": {"loss": 0.0, "step": 7},
    }
    folder = Path(config.run.dir, "checkpoints")
    folder.mkdir(parents=True)
    torch.save(saved, folder / "best.pt")
    return config.run.dir


def wrong(network: Portable, path: Path) -> Answer:
    """A format whose file answers otherwise by a little more than is tolerated."""
    path.write_bytes(b"written")
    return lambda images: network.network(images) + 0.0011


def unsure(network: Portable, path: Path) -> Answer:
    """A format whose file answers with what is no number."""
    path.write_bytes(b"written")
    return lambda images: network.network(images) * torch.nan


def alone(network: Portable, path: Path) -> Answer:
    """A format whose file can't take several images at once."""
    path.write_bytes(b"written")

    def answer(images: Tensor) -> Tensor:
        return network.network(images[:1]).expand(len(images), -1)

    return answer


@pytest.mark.parametrize("size", [(40, 90), (100, 21), (32, 32), (20, 25), (375, 500)])
def test_images_of_any_size_are_cut_as_evaluation_does(size: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (*size, 3), dtype=torch.uint8, generator=generator)
    for side in (32, 48):
        expected = torch.empty((side, side, 3), dtype=torch.uint8)
        centre_crop(pixels, expected)
        found = middle_square(pixels[None], side)[0].permute(1, 2, 0)
        difference = (found - expected).abs()
        assert difference.max() <= 1
        assert (difference > 0).float().mean() < 0.005


def test_views_are_those_of_evaluation() -> None:
    pixels = torch.randint(0, 256, (2, 9, 9, 3), dtype=torch.uint8)
    for _, shift, is_mirrored in VIEWS["shift"]:
        shifts = torch.full((2, 2), shift)
        expected = shift_and_flip(pixels, shifts, torch.full((2,), is_mirrored))
        found = moved(pixels.permute(0, 3, 1, 2), shift, is_mirrored)
        assert torch.equal(found, expected.permute(0, 3, 1, 2))


def test_weights_are_exported_with_all_that_is_needed_to_use_them(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", run, "--format", "safetensors"]) == 0
    said = capsys.readouterr().out
    assert "the same class for 4 of 4 images" in said
    path = Path(run, "export", "model.safetensors")
    with safe_open(path, "pt") as file:
        about = {key: json.loads(text) for key, text in file.metadata().items()}
        saved = torch.load(f"{run}/checkpoints/best.pt", weights_only=True)["state"]["model"]
        assert set(file.keys()) == set(saved)
        for name in file.keys():  # noqa: SIM118 - it is no dict
            assert torch.equal(file.get_tensor(name), saved[name])
    assert about["classes"] == ["ant", "bee"]
    assert (about["side"], about["step"], about["mean"]) == (32, 7, [0.5, 0.4, 0.3])
    assert str(Path(run).parent) not in json.dumps(about)  # it goes to others
    assert [file.name for file in path.parent.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("format_", [wrong, unsure, alone])
@pytest.mark.parametrize("form", [[], ["--raw"]])
def test_a_file_that_answers_otherwise_is_not_left_there(
    format_: object,
    form: list[str],
    run: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(exporting.FORMATS, "pt2", format_)
    if form and format_ is wrong:  # that adds the same to all logits, which changes nothing
        assert main(["export", run, "--format", "pt2", *form]) == 0
        return
    assert main(["export", run, "--format", "pt2", *form]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "answers otherwise" in said
    assert list(Path(run, "export").iterdir()) == []


class Labelled(list):
    """Images that are what is to be answered to them, and labels."""

    taken = staticmethod(lambda pixels: pixels)


@pytest.mark.parametrize("lost", [0, 2, 3])
def test_fewer_bits_may_cost_half_a_point_and_no_more(lost: int) -> None:
    answers = torch.nn.functional.one_hot(torch.arange(400) % 10)
    images = Labelled((answer[None], int(answer.argmax())) for answer in answers)
    turned = iter(range(400))

    def fewer_bits(answer: Tensor) -> Tensor:
        return answer.roll(int(next(turned) < lost))

    if lost > 2:
        with pytest.raises(FaultError, match=r"right less often: top-1 99\.25% .* 0\.5 points"):
            compare_scores(fewer_bits, lambda answer: answer, images)
    else:
        said = compare_scores(fewer_bits, lambda answer: answer, images)
        assert said == f"top-1 {1 - lost / 400:.2%} of 400 images, 100.00% in float32"


def test_a_library_that_is_missing_is_named_with_the_command(
    run: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(onnx_graph, "NEEDED", ("onnx_of_nobody",))
    assert main(["export", run]) == 2
    assert "pip install onnx_of_nobody" in capsys.readouterr().err
    assert not Path(run, "export").exists()


MISTAKES = {
    "--images 0": "--images 0 is not in 1",
    "--format pt2 --int8": "--int8 is made of the ONNX file",
    "--tolerance -1": "--tolerance -1 is not in 0",
    "--format onx": "onnx",
    "--format safetensors --split test": "test",
    "--format safetensors --out /proc/nowhere": "cannot write to '/proc/nowhere'",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_in_an_export_is_answered_in_one_line(
    words: str, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", run, *words.split()]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert MISTAKES[words] in said


def test_images_of_other_classes_are_refused(
    run: str, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other").mkdir()
    for name in ("train", "val"):
        (tmp_path / "other" / name).mkdir()
        (tmp_path / "other" / name / "wasp").symlink_to(photos / name / "ant")
    words = ["--format", "safetensors", "--root", str(tmp_path / "other")]
    assert main(["export", run, *words]) == 2
    assert "not those of the images: 1: wasp" in capsys.readouterr().err


@pytest.mark.parametrize("is_raw", [False, True])
@pytest.mark.parametrize("name", START)
def test_an_example_is_short_and_imports_nothing_of_this_package(name: str, is_raw: bool) -> None:
    text = example(name, is_raw)
    compile(text, name, "exec")
    assert len(text.split('"""')[2].strip().splitlines()) < 32
    assert __name__.partition(".")[0] not in text
    assert "from ." not in text


def test_one_export_at_a_time_works_in_a_folder_and_removes_what_a_killed_one_left(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(run, "export")
    (folder / ".export-x").mkdir(parents=True)
    for name in (".export-x/model.onnx", ".model.onnx.0123abcd.tmp", ".mine.0123abcd.tmp"):
        (folder / name).touch()
    words = ["export", run, "--format", "safetensors"]
    other = os.open(folder, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "export' is being exported to by another process" in said
    os.close(other)
    assert main(words) == 0
    assert {path.name for path in folder.iterdir()} == {"model.safetensors", ".mine.0123abcd.tmp"}
