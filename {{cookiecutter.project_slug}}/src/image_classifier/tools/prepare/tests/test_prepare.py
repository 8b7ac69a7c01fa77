"""Prepared images: those of the files, written once, whole, and used as long as they are true."""

import os
import pickle
import re
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import DAMAGED, changed, read_image, write_photo
from PIL import Image
from safetensors.torch import save_file

from image_classifier.cli import main
from image_classifier.config import (
    Config,
    DataConfig,
    ImagesConfig,
)
from image_classifier.data import (
    DATASETS,
    Source,
    decode,
    open_dataset,
)
from image_classifier.data.autotune import common_side
from image_classifier.data.crops import resize
from image_classifier.errors import UserError
from image_classifier.presets import PRESETS
from image_classifier.runtime import platform
from image_classifier.runtime.config_dict import words_of
from image_classifier.tools.prepare import prepare as writing
from image_classifier.tools.prepare import source as prepared
from image_classifier.train import train


@pytest.fixture
def root(photos, tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "MIN_IMAGES", 4)  # of a file
    return Path(shutil.copytree(photos, tmp_path / "photos"))


def prepare(root, *words):
    return main(["prepare", "--data.root", str(root), "--side", "48", *words])


def opened(root, **knobs):
    """The training images as training opens them."""
    return open_dataset(DataConfig(name="folder", root=str(root), **knobs), "train")


def contents(root):
    """The files that hold prepared training images."""
    return {p.name: p.read_bytes() for p in (root.parent / "photos.cache/train").glob("i*")}


def test_the_images_of_prepare_are_those_of_train(monkeypatch):
    own = {"root": "a", "val_fraction": 0.1, "fold": 3, "cache": "c", "channels": 5, "bits": 16}
    of_tools = {"labels": "b.csv", "columns": ("path=Image",), "groups": "a", "test_fraction": 0.5}
    own |= {knob: of_tools[knob] for knob in asdict(ImagesConfig()) if knob in of_tools}
    data = DataConfig(name="folder", **own)
    assert asdict(ImagesConfig(name="folder", **own)) == {"name": "folder", **own}  # that is all
    monkeypatch.setitem(PRESETS, "own", lambda: Config(data=data))
    opened = Mock(side_effect=UserError("enough"))
    monkeypatch.setattr(writing, "prepare_images", opened)
    words = words_of({f"data.{knob}": value for knob, value in own.items()})
    for source in (["own"], words):  # a preset, the command line
        assert main(["prepare", *source]) == 2
        assert opened.call_args.args[0] == data


@pytest.mark.parametrize(("form", "error"), [("raw", 0), ("jpeg", 4)])
def test_prepared_images_are_those_of_the_files(root, form, error):
    files = opened(root)
    assert not files.recipe
    assert prepare(root, "--format", form) == 0
    source = opened(root)
    assert source.recipe.startswith("raw" if form == "raw" else "JPEG of quality 85")
    assert source.fingerprint() != files.fingerprint()
    elsewhere = pickle.loads(pickle.dumps(source))
    for index in range(12):
        pixels, whole = source.read(index), files.read(index)
        assert torch.equal(pixels, elsewhere.read(index))
        scale = 48 / min(whole.shape[:2])
        expected = resize(whole, *(round(scale * side) for side in whole.shape[:2]))
        assert pixels.shape == expected.shape
        assert (pixels.float() - expected.float()).abs().mean() <= error
    assert torch.equal(source.thinned(3).read(1), source.read(4))
    if form == "raw":
        assert source.read(3).data_ptr() == source.read(3).data_ptr()  # nothing is copied


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have names in Unicode alone")
def test_a_folder_whose_name_is_not_utf8_is_prepared_and_trained_on(root, config):
    named = root.rename(root.with_name(os.fsdecode(b"gr\xfcn")))
    assert prepare(named) == 0
    run = str(root.with_name(os.fsdecode(b"l\xe4ufe")))
    data = {"data__name": "folder", "data__root": str(named), "data__batch_size": 4}
    train(changed(config, **data, run__dir=run, epochs=2.0))
    assert opened(named).recipe
    assert Path(run, "predictions.safetensors").exists()


def test_of_two_files_of_one_name_a_split_has_its_own(tmp_path):
    root = tmp_path / "photos"
    for number, split in enumerate(("train", "val")):
        for name in ("ant/1", "ant/2", "bee/1"):
            path = root / split / f"{name}.bmp"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (64, 64), (200 * number, 0, 0)).save(path)
            os.utime(path, (1, 1))
    assert prepare(root) == 0
    (root / "train/ant/2.bmp").unlink()
    assert opened(root).notes[-1].startswith("prepared images")
    assert int(opened(root).read(0)[0, 0, 0]) == 0


def test_small_images_are_not_enlarged_and_can_be_resident(tmp_path):
    for name in ("train/ant", "train/bee", "val/ant"):
        write_photo(tmp_path / f"photos/{name}/1.jpg", 0, size=(40, 40))
    assert prepare(tmp_path / "photos") == 0
    assert common_side(opened(tmp_path / "photos")) == 40


def test_a_run_uses_what_is_prepared_and_goes_on_with_nothing_else(root, on_photos, capsys):
    config = changed(on_photos, epochs=1, data__root=str(root), data__limit=0, data__workers=0)
    config = changed(config, data__cache="")  # beside the images
    assert prepare(root) == 0
    train(config)
    assert capsys.readouterr().out.count("prepared images: ") == 2
    with pytest.raises(UserError, match=r"learned from prepared images \(raw.* not from the files"):
        train(changed(config, data__cache="off"))


def test_images_that_an_earlier_version_decoded_are_prepared_again(root, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(prepared, "VERSION", 2)  # which lost some EXIF orientations
        assert prepare(root) == 0
        before = contents(root)
    assert "it is of another version; `prepare` again" in opened(root).notes[-1]
    assert prepare(root) == 0
    after = contents(root)
    assert not opened(root).notes[-1].startswith("not ")
    assert all(after[name] != before[name] for name in after)


def test_a_command_that_ended_early_loses_no_file_that_was_written(root, refusal):
    image, folder = root / "train/bee/5.jpg", root.parent / "photos.cache/train"
    photo = image.read_bytes()
    image.write_bytes(b"<html>")
    said = "train/bee/5.jpg': not a JPEG.*; `check --quarantine` leaves out all such files"
    assert re.search(said, refusal("prepare", "--data.root", root, "--side", 48))
    assert sorted(contents(root)) == ["images-00000.safetensors", "images-00001.safetensors"]
    assert "`prepare` did not finish" in opened(root).notes[-1]
    before = (folder / "images-00001.safetensors").stat()
    (folder / ".index.safetensors.0123abcd.tmp").touch()  # of a kill
    image.write_bytes(photo)
    assert prepare(root) == 0
    assert (folder / "images-00001.safetensors").stat().st_ino == before.st_ino
    resumed = contents(root)
    assert len(os.listdir(folder)) == 5  # and nothing half written
    shutil.rmtree(folder)
    assert prepare(root) == 0
    assert contents(root) == resumed


@pytest.mark.parametrize("name", ["index.safetensors", "images-00001.safetensors"])
def test_damage_is_named_and_mended(root, name):
    assert prepare(root) == 0
    expected, path = contents(root), root.parent / "photos.cache/train" / name
    whole = expected[name]
    places = (30, 330, len(whole) - 5)
    flipped = [whole[:n] + bytes([whole[n] ^ 1]) + whole[n + 1 :] for n in places]
    for content in (*flipped, whole[:-100], *DAMAGED.values()):
        path.write_bytes(content)
        if name.startswith("index") or content not in flipped:
            with pytest.raises(UserError, match=f"{name}' are damaged: .*`prepare` mends"):
                opened(root).read(4)
        assert opened(root, cache="off").recipe == ""
        assert prepare(root) == 0
        assert contents(root) == expected


def test_images_that_are_prepared_anew_are_no_longer_those_of_a_run(root):
    assert prepare(root) == 0
    source = opened(root)
    source.read(0)
    assert prepare(root, "--side", "40") == 0
    assert min(source.read(1).shape[:2]) == 48  # mapped already
    with pytest.raises(UserError, match="prepared anew"):
        source.read(11)


def test_all_folds_are_read_from_the_prepared_images_of_both_splits(root):
    root /= "train"
    files = opened(root)
    assert prepare(root) == 0
    assert (len(opened(root)), opened(root).recipe) == (len(files), "raw, shorter side 48")
    names = []
    for fold in range(3):
        data = DataConfig(name="folder", root=str(root), val_fraction=1 / 3, fold=fold)
        source = open_dataset(data, "val")
        assert source.recipe == "raw, shorter side 48"
        names += map(source.name, range(len(source)))
        for index in range(len(source)):
            pixels, whole = source.read(index), read_image(source.paths[index])
            scale = 48 / min(whole.shape[:2])
            side = (round(scale * side) for side in whole.shape[:2])
            assert torch.equal(pixels, resize(whole, *side))
    assert len(set(names)) == len(names) == 12
    os.utime(names[0], (0, 0))
    data = DataConfig(name="folder", root=str(root), val_fraction=1 / 3)
    assert "prepared from other files" in open_dataset(data, "val").notes[-1]


def test_images_of_a_table_are_prepared_by_split(root, tmp_path):
    pytest.importorskip("image_classifier.tools.label_table")
    names = [f"train/{('ant', 'bee')[n % 2]}/{n}.jpg" for n in range(8)]
    names[0] = str(root / names[0])
    rows = (f"{name},{n % 2},{('train', 'val')[n // 2 % 2]}\n" for n, name in enumerate(names))
    (tmp_path / "labels.csv").write_text("path,label,split\n" + "".join(rows))
    assert prepare(root, "--data.labels", str(tmp_path / "labels.csv")) == 0
    for split in ("train", "val"):
        data = DataConfig("folder", str(root), labels=str(tmp_path / "labels.csv"), image_size=32)
        source = open_dataset(data, split)
        assert (len(source), source.recipe) == (4, "raw, shorter side 48")
        for index in range(4):
            whole = read_image(source.paths[index])
            scale = 48 / min(whole.shape[:2])
            side = (round(scale * side) for side in whole.shape[:2])
            assert torch.equal(source.read(index), resize(whole, *side))


def test_other_images_are_read_from_their_files_until_they_are_prepared(root, capsys):
    assert prepare(root) == 0
    assert "48, are less than 64" in opened(root, image_size=64).notes[-1]
    image, other = root / "train/ant/2.jpg", root / "train/ant/9.jpg"
    for change in (
        lambda: os.utime(image, (0, 0)),
        lambda: shutil.copy(image, other),
        lambda: other.rename(root / "train/ant/8.jpeg"),
    ):
        change()
        assert "its images were prepared from other files" in opened(root).notes[-1]
        assert not opened(root).recipe
        capsys.readouterr()
        assert prepare(root) == 0
        assert opened(root).recipe
    image.unlink()
    assert opened(root).recipe  # the others are prepared
    capsys.readouterr()
    assert prepare(root) == 0
    said = capsys.readouterr().out
    assert "shorter side 48: written in " in said
    assert "val: 4 images, raw, shorter side 48: all checksums are right, nothing to do" in said
    save_file({"places": torch.zeros(1)}, root.parent / "photos.cache/train/index.safetensors")
    assert "it is of another version; `prepare` again" in opened(root).notes[-1]  # version 1


def test_a_mistake_in_preparing_is_answered_in_one_line(root, refusal, monkeypatch):
    words = ("prepare", "--data.root", root)
    in_memory = Source(torch.zeros(1).long(), ("ant",), pixels=torch.zeros(1, 8, 8, 3).byte())
    monkeypatch.setitem(DATASETS, "mine", lambda *_: in_memory)
    assert "in memory" in refusal(*words, "--data.name", "mine")
    assert "--side 7 is not in 8 .. 4096" in refusal(*words, "--side", "7")
    assert "cannot write prepared images" in refusal(*words, "--data.cache", "/proc/nowhere")
    monkeypatch.setattr(platform, "lock", Mock(side_effect=BlockingIOError))
    assert "by another process" in refusal(*words)


def test_images_of_any_channels_and_16_bits_are_prepared_as_they_are(satellite, tmp_path, refusal):
    root = Path(shutil.copytree(satellite, tmp_path / "photos"))
    files, words = opened(root, channels=5, bits=16), ["--data.channels", "5", "--data.bits", "16"]
    assert "jpeg has 3 channels of 8 bits, not 5 of 16: --format raw" in refusal(
        "prepare", "--data.root", root, *words, "--format", "jpeg"
    )
    assert prepare(root, *words) == 0
    source = opened(root, channels=5, bits=16)
    assert source.recipe == "raw of 5 channels of 16 bits, shorter side 48"
    for index in range(24):
        expected = files.read(index)
        scale = min(1, 48 / min(expected.shape[:2]))
        expected = resize(expected, *(round(scale * side) for side in expected.shape[:2]))
        assert torch.equal(source.read(index), expected)
    assert "its images have 5 channels of 16 bits" in opened(root, channels=5).notes[-1]


@pytest.mark.parametrize("library", ["simplejpeg", "pillow"])
def test_jpegs_of_a_lower_quality_are_smaller(library, root, monkeypatch):
    if library == "pillow":
        for module in (decode, prepared, writing):
            monkeypatch.setattr(module, "simplejpeg", None)
    sizes = []
    for quality in ("90", "20"):
        assert prepare(root, "--format", "jpeg", "--quality", quality) == 0
        assert opened(root).recipe.startswith(f"JPEG of quality {quality},")
        sizes.append(sum(map(len, contents(root).values())))
    assert sizes[1] < 0.7 * sizes[0]
    reader = opened(root).reader
    assert reader(0).shape[2] == 3
    reader.shards = [shard if shard is None else shard * 0 for shard in reader.shards]
    with pytest.raises(UserError, match=r"are damaged: .*`prepare` mends"):
        reader(0)


def test_a_side_of_images_that_stay_as_they_are_is_refused(root, refusal):
    said = refusal("prepare", "--data.root", root, "--format", "tar", "--side", "48")
    assert "--format tar keeps images as they are: leave out --side and --quality" in said


def test_a_quality_of_pixels_that_are_no_jpeg_is_refused(root, refusal):
    said = refusal("prepare", "--data.root", root, "--quality", "50")
    assert "--quality is that of --format jpeg; raw keeps pixels: leave it out" in said


def test_only_the_splits_that_are_named_are_prepared(root):
    assert prepare(root, "--splits", "val") == 0
    assert {path.name for path in (root.parent / "photos.cache").iterdir()} == {"val"}


def test_a_file_that_changes_as_it_is_prepared_is_read_anew(root, monkeypatch):
    encode = writing.encode

    def changing(files, number, recipe):
        found = encode(files, number, recipe)
        os.utime(root / "train/bee/5.jpg", (0, 0))
        return found

    monkeypatch.setattr(writing, "encode", changing)
    assert prepare(root) == 0
    assert "its images were prepared from other files" in opened(root).notes[-1]


def test_images_of_just_the_size_of_training_are_used(root):
    assert prepare(root) == 0
    assert opened(root, image_size=48).recipe == "raw, shorter side 48"


def test_an_end_in_the_midst_of_another_size_leaves_no_images_of_two(root, monkeypatch):
    assert prepare(root) == 0
    write = writing.write_shard

    def only_first(path, *words):
        if path.name != "images-00000.safetensors":
            raise OSError(28, "No space left on device")
        write(path, *words)

    monkeypatch.setattr(writing, "write_shard", only_first)
    assert prepare(root, "--side", "40") != 0
    assert "`prepare` did not finish" in opened(root).notes[-1]
    assert min(opened(root).read(0).shape[:2]) > 48  # of the file


def test_folds_take_no_images_that_another_split_has_in_another_size(root):
    root /= "train"
    assert prepare(root) == 0
    assert prepare(root, "--splits", "val", "--side", "40") == 0
    data = DataConfig(name="folder", root=str(root), fold=1)
    source = open_dataset(data, "train")
    assert not source.recipe
    assert "prepared from other files" in source.notes[-1]
