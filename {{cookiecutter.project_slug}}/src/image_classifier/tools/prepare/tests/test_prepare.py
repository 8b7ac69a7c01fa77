"""Prepared images: those of the files, written once, whole, and used as long as they are true."""

import os
import pickle
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import changed, run_alone, write_photo

from image_classifier.cli import main
from image_classifier.config import Config, DataConfig
from image_classifier.data import prepare as writing
from image_classifier.data.autotune import common_side
from image_classifier.data.crops import resize
from image_classifier.data.datasets import DATASETS, open_dataset
from image_classifier.data.datasets.source import Source
from image_classifier.data.decode import read_image
from image_classifier.errors import UserError
from image_classifier.train import train


@pytest.fixture(autouse=True)
def in_small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few images to a file, and no threads that wait for each other where there is little to do."""
    monkeypatch.setattr(writing, "MIN_IMAGES", 4)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def root(photos: Path, tmp_path: Path) -> Path:
    """Photographs, 12 and 4, that a test may change."""
    return Path(shutil.copytree(photos, tmp_path / "photos"))


def prepare(root: Path, *words: str) -> int:
    """What the command `prepare` returns for `root`."""
    return main(["prepare", "--data.root", str(root), "--side", "48", *words])


def opened(root: Path, split: str = "train", **knobs: object) -> Source:
    """A split as training opens it."""
    return open_dataset(DataConfig(name="folder", root=str(root), **knobs), split)


def contents(root: Path) -> dict[str, bytes]:
    """The files that hold prepared training images."""
    return {p.name: p.read_bytes() for p in (root.parent / "photos.cache/train").glob("[im]*")}


def pixels_at_48(path: Path) -> torch.Tensor:
    """An image with a shorter side of 48 pixels."""
    pixels = read_image(path)
    height, width = pixels.shape[:2]
    scale = 48 / min(height, width)
    return resize(pixels, round(height * scale), round(width * scale))


def test_raw_images_are_the_pixels_of_the_files(root: Path) -> None:
    files = opened(root)
    assert not files.recipe
    assert prepare(root) == 0
    source = opened(root)
    assert source.notes[-1].endswith("photos.cache/train, raw, shorter side 48")
    assert source.fingerprint() != files.fingerprint()
    few = source.thinned(3)
    for elsewhere in (source, pickle.loads(pickle.dumps(source))):
        for index in range(12):
            assert torch.equal(elsewhere.read(index), pixels_at_48(files.paths[index]))
    for index, number in enumerate((0, 4, 8)):
        assert torch.equal(few.read(index), source.read(number))
    assert source.read(3).data_ptr() == source.read(3).data_ptr()  # nothing is copied


def test_jpegs_are_nearly_the_pixels_of_the_files(root: Path) -> None:
    assert prepare(root, "--format", "jpeg") == 0
    source = opened(root)
    for index in range(12):
        expected = pixels_at_48(source.paths[index])
        assert source.read(index).shape == expected.shape
        assert (source.read(index).float() - expected.float()).abs().mean() < 4
    assert len(contents(root)["images-00000.safetensors"]) < 30_000


def test_small_images_are_not_enlarged_and_can_be_resident(tmp_path: Path) -> None:
    for number in range(8):
        name = f"{('train', 'val')[number % 2]}/ant/{number}.jpg"
        write_photo(tmp_path / "photos" / name, number, size=(40, 40))
    assert prepare(tmp_path / "photos") == 0
    source = opened(tmp_path / "photos")
    assert source.read(0).shape == (40, 40, 3)
    assert common_side(source) == 40


def test_a_run_uses_what_is_prepared_and_goes_on_with_nothing_else(
    root: Path, config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    config = changed(
        config,
        epochs=1,
        data__name="folder",
        data__root=str(root),
        data__limit=0,
        data__batch_size=4,
        data__workers=1,
        augment__crop="resized",
    )
    assert prepare(root) == 0
    capsys.readouterr()
    scores = train(config)
    said = capsys.readouterr().out
    assert said.count("prepared images: ") == 2
    assert main(["evaluate", config.run.dir]) == 0
    assert f"top-1 {scores.top1:.2%}" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"learned from prepared images \(raw.* not from the files"):
        train(changed(config, data__cache="off"))
    assert train(config).metrics() == scores.metrics()


def die_in_the_third_file(root: Path) -> None:
    """Prepare in one thread, up to the ninth image that is written."""
    count = 0

    def read(path: Path) -> torch.Tensor:
        nonlocal count
        count += 1
        if count == 12 + 9:  # the first 12 are samples
            os.kill(os.getpid(), signal.SIGKILL)
        return read_image(path)

    writing.MIN_IMAGES, writing.read_image, writing.num_cores = 4, read, lambda: 1
    prepare(root)


def test_a_kill_loses_no_file_that_was_written(root: Path) -> None:
    assert prepare(root) == 0
    expected = contents(root)
    cache = root.parent / "photos.cache"
    shutil.rmtree(cache)
    assert run_alone(die_in_the_third_file, root)[0] == -signal.SIGKILL
    assert sorted(contents(root)) == ["images-00000.safetensors", "images-00001.safetensors"]
    assert "not complete" in opened(root).notes[-1]
    kept = cache / "train" / "images-00001.safetensors"
    before = kept.stat()
    assert prepare(root) == 0
    assert contents(root) == expected
    assert kept.stat().st_ino == before.st_ino
    assert len(os.listdir(cache / "train")) == 6  # and nothing half written


@pytest.mark.parametrize("place", [30, 600, 700, -5])
def test_a_flipped_bit_is_found_and_mended(
    root: Path, place: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare(root) == 0
    expected = contents(root)
    path = root.parent / "photos.cache" / "train" / "images-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    capsys.readouterr()
    assert prepare(root) == 0
    assert "2 of 3 files kept" in capsys.readouterr().out
    assert contents(root) == expected
    assert prepare(root) == 0
    assert capsys.readouterr().out.count("nothing to do") == 2


@pytest.mark.parametrize("name", ["images-00002", "index"])
def test_a_file_that_was_cut_short_is_found_before_training(root: Path, name: str) -> None:
    assert prepare(root) == 0
    path = root.parent / "photos.cache" / "train" / f"{name}.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match=f"{name}.safetensors' are damaged"):
        opened(root)
    assert opened(root, cache="off").recipe == ""


def test_images_that_are_prepared_anew_are_no_longer_those_of_a_run(root: Path) -> None:
    assert prepare(root) == 0
    source = opened(root)
    source.read(0)
    assert prepare(root, "--side", "40") == 0
    assert min(source.read(1).shape[:2]) == 48  # mapped already
    with pytest.raises(UserError, match="prepared anew"):
        source.read(11)


CHANGES = {
    "1 changed, 0 new, 0 gone": lambda folder: os.utime(folder / "2.jpg", (0, 0)),
    "0 changed, 1 new, 0 gone": lambda folder: shutil.copy(folder / "2.jpg", folder / "9.jpg"),
    "0 changed, 0 new, 1 gone": lambda folder: (folder / "2.jpg").unlink(),
    "0 changed, 1 new, 1 gone": lambda folder: (folder / "2.jpg").rename(folder / "9.jpg"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_images_are_read_from_their_files_until_they_are_prepared(
    root: Path, change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare(root) == 0
    CHANGES[change](root / "train" / "ant")
    source = opened(root)
    assert not source.recipe
    assert change in source.notes[-1]
    capsys.readouterr()
    assert prepare(root) == 0
    assert opened(root).recipe
    assert "val: 4 images" in capsys.readouterr().out.splitlines()[1]


def test_images_that_are_too_small_are_passed_over(root: Path) -> None:
    assert prepare(root) == 0
    assert "48, are less than --data.image-size" in opened(root, image_size=64).notes[-1]


def test_a_mistake_in_preparing_is_answered_in_one_line(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def complaint(*words: str) -> str:
        capsys.readouterr()
        assert prepare(root, *words) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        return said

    in_memory = Source(torch.zeros(1).long(), ("ant",), pixels=torch.zeros(1, 8, 8, 3).byte())
    monkeypatch.setitem(DATASETS, "mine", lambda *_: in_memory)
    assert "in memory" in complaint("--data.name", "mine")
    assert "--side 7 is not in 8 .. 4096" in complaint("--side", "7")
    assert "no preset 'foldr'" in (main(["prepare", "foldr"]) and capsys.readouterr().err)
    assert "cannot write prepared images" in complaint("--data.cache", "/proc/nowhere")
    cache = root.parent / "photos.cache" / "train"
    cache.mkdir(parents=True, exist_ok=True)
    (cache / ".manifest.json.0123abcd.tmp").touch()  # of one that was killed
    with writing.alone_in(cache):
        assert "by another process" in complaint()
        assert not [*cache.glob("*.tmp")]
    with monkeypatch.context() as patch:
        patch.setattr(writing.shutil, "disk_usage", lambda _: SimpleNamespace(free=5e4))
        assert "are needed, 5e-05 GB are free" in complaint()
    (root / "train" / "bee" / "5.jpg").write_bytes(b"<html>")
    assert "photos/train/bee/5.jpg': not a JPEG" in complaint()
