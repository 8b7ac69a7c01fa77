"""Images in tar shards: those of the files, from anywhere, whole or refused."""

import bz2
import gzip
import io
import lzma
import os
import pickle
import re
import shutil
import signal
import tarfile
import threading
import tracemalloc
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest.mock import Mock

import fsspec
import numpy as np
import pytest
import torch
from conftest import after_each_step, changed, needs_fork, run_alone, train_until
from PIL import Image

from image_classifier.checkpoints.reading import read_checkpoint
from image_classifier.config import DataConfig
from image_classifier.data import BadImageError, open_dataset
from image_classifier.errors import FaultError, UserError
from image_classifier.extensions import of_tools
from image_classifier.runtime import platform
from image_classifier.tools.tar import index, storage
from image_classifier.train import train

# A shard that changes ends a run that skips unreadable images, too.
SKIPPING = {"on_bad_image": "skip"} if "data.on_bad_image" in of_tools() else {}


def write_tar(path, members, mode="w"):
    """Write a tar file with these members."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as shard:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            shard.addfile(entry, io.BytesIO(content))
    return path


def pack(photos, root, count=2):
    """The photographs of a folder in tar shards, each with its `.cls`: the name of its class."""
    for split in ("train", "val"):
        files = sorted((photos / split).glob("*/*.jpg"))
        for part in range(count):
            members = {}
            for file in files[part * len(files) // count : (part + 1) * len(files) // count]:
                members[f"{file.stem}.cls"] = f"{file.parent.name}\n".encode()
                members[f"{file.stem}.jpg"] = file.read_bytes()
            write_tar(root / f"{split}-{part:06}.tar", members)
    return root


@pytest.fixture(scope="module")
def packed(photos, tmp_path_factory):
    return pack(photos, tmp_path_factory.mktemp("packed") / "shards")


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(storage, "WAITS", (0.0, 0.0, 0.0))


def opened(root, split="train", **knobs):
    return open_dataset(DataConfig(name="tar", root=str(root), **knobs), split)


def weights(config):
    """The weights at the end of a run."""
    return read_checkpoint(Path(config.run.dir, "checkpoints", "last.pt"))["state"]["model"]


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def assert_same_images(source, files):
    assert (source.classes, source.labels.tolist()) == (files.classes, files.labels.tolist())
    for number in range(len(files)):
        assert torch.equal(source.read(number), files.read(number))


@pytest.mark.parametrize("knobs", [{}, {"augment__crop": "resized"}], ids=["resident", "streamed"])
def test_a_run_ends_as_from_files_with_any_workers_and_after_a_kill(
    on_photos, packed, tmp_path, knobs, monkeypatch
):
    files = changed(on_photos, data__limit=0, data__workers=0, **knobs)
    shards = changed(files, data__name="tar", data__root=str(packed), data__workers=2)
    shards = changed(shards, run__dir=str(tmp_path / "shards"))
    train(files)
    assert run_alone(train_until, shards, 3)[0] == -signal.SIGKILL
    monkeypatch.setattr(platform, "START_METHOD", "forkserver")  # which pickles, as spawn does
    train(changed(shards, data__workers=1))
    assert_same(weights(shards), weights(files))


def test_images_are_read_elsewhere_and_in_part(packed):
    source = opened(packed)
    elsewhere = pickle.loads(pickle.dumps(source)).thinned(3)
    for number in range(3):
        assert torch.equal(elsewhere.read(number), source.read(4 * number))
    assert elsewhere.name(2) == str(packed / "train-000001.tar/3.jpg")


LABELS = {
    "a/b.1.jpg b.jpg": ({}, None, "image 'b.jpg' of .* has no label: add 'b.cls'"),
    "ant/1.jpg bee/2.jpg": ({}, [0, 1], ("ant", "bee")),
    "x/1.jpg x/2.png 1.jpg": (
        {"x/1.cls": b"0", "x/2.json": b'{"label": 2}', "1.cls": b"1"},
        [0, 2, 1],
        ("0", "1", "2"),
    ),
    "1.jpg 2.jpg": (
        {"2.json": b'{"labels": ["b", "a"]}', "1.json": b'{"labels": []}', "2.txt": b""},
        [[0, 0], [1, 1]],
        ("a", "b"),
    ),
    "3.jpg 4.jpg": ({"3.cls": b"0", "4.cls": b"cat"}, None, "should be names, or numbers from 0"),
    "5.jpg": ({"5.json": b'{"label": 0.5}'}, None, "a number or a name, not 0.5"),
    "6.jpg": ({"6.json": b"{"}, None, "cannot be read: Expecting"),
    "ant/._7.jpg": ({}, None, "there is no image in"),
    # Dots in names: of several members, the longest name that the image's begins with.
    "IMG.2024.0.jpg IMG.2024.1.jpg": (
        {"IMG.2024.0.cls": b"0", "IMG.2024.1.cls": b"1"},
        [0, 1],
        "01",
    ),
    "8.left.jpg 8.right.jpg": ({"8.cls": b"1", "8.right.json": b'{"label": 0}'}, [1, 0], "01"),
    "v1.2/9.a.jpg": ({"v1.cls": b"5"}, [0], ("v1.2",)),
    "10.a.jpg": ({"10.b.cls": b"1"}, None, "'10.a.jpg' of .* has no label: add '10.a.cls'"),
    "ant/11.jpg": (
        {"ant/11.seg.json": b"[" * 100_000, "12.cls": b"\xff"},
        [0],
        ("ant",),
    ),  # others'
    # Labels from outside.
    "13.jpg": ({"13.cls": b"999999999"}, None, "the largest label is 999,999,999, and would make"),
    "14.jpg": ({"14.cls": b"9" * 5000}, None, "label '14.cls' of .* cannot be read: Exceeds the"),
    "15.jpg": ({"15.cls": b"a\xff"}, None, "label '15.cls' of .* cannot be read: 'utf-8' codec"),
    "16.jpg": ({"16.json": b"[" * 100_000}, None, "'16.json' .* be read: (maximum recurs|Stack o)"),
    "17.jpg": ({"17.json": rb'{"label": "\ud800\n"}'}, [0], (r"\ud800\n",)),
    "18.jpg": ({"18.cls": bytes(2**20 + 1)}, None, "'18.cls' of .*: it has 1,048,577 bytes, more"),
    "19.jpg": ({"19.json": b'{"label": %s}' % b"[0.5]" * 999}, None, "'19.json' of .*: Extra data"),
    "19.jpg 19.b.jpg": (  # a byte order mark, of editors on Windows
        {"19.cls": b"\xef\xbb\xbf0", "19.b.cls": b"\xef\xbb\xbf1\r\n"},
        [0, 1],
        "01",
    ),
    "20.jpg": ({"20.cls": b" \n"}, None, "label '20.cls' of .* cannot be read: it is empty"),
    "21.jpg": ({"21.json": b'{"labels": ["a", ""]}'}, None, r"a number or a name, not \['a', ''\]"),
    "ant/22.JPG ant/23.jpg": (
        {"ant/22.CLS": b"bee", "ant/23.JSON": b'{"label": "cat"}'},
        [0, 1],
        ("bee", "cat"),
    ),
    # Of one image, `.cls` counts, in whatever order.
    "24.jpg 25.jpg": (
        {"24.json": b'{"label": 1}', "24.cls": b"0", "25.cls": b"1", "25.json": b'{"label": 0}'},
        [0, 1],
        "01",
    ),
    # Folders above those of the classes; a class may be called as a part.
    "x/train/ant/26.jpg x/train/test/27.jpg": ({}, [0, 1], ("ant", "test")),
    "train/ant/28.jpg val/ant/29.jpg": (
        {},
        None,
        "holds train and val: pack each into a tar file of its own, or unpack it and use",
    ),
    "x/seg_train/30.jpg x/seg_test/31.jpg": (
        {"x/seg_train/30.cls": b"0", "x/seg_test/31.cls": b"1"},
        None,
        "holds test and train: pack each",
    ),
    "\udcff/20.jpg \udcfe.jpg": ({"\udcfe.cls": b"b"}, [0, 1], (r"\xff", "b")),
}


@pytest.mark.parametrize("images", LABELS)
def test_labels_are_members_or_folders(tmp_path, images):
    more, labels, expected = LABELS[images]
    members = dict.fromkeys(images.split(), b"image") | more
    write_tar(tmp_path / "own/train/7.tar", members)
    if labels is None:
        with pytest.raises(UserError, match=expected) as caught:
            opened(tmp_path / "own")
        assert "\n" not in str(caught.value)
        return
    write_tar(tmp_path / "own/validation-0.tar", members)
    source = opened(tmp_path / "own")
    assert (source.labels.tolist(), source.classes) == (labels, tuple(expected))
    assert source.fingerprint()


def test_classes_may_be_named_and_those_of_training_count(tmp_path):
    write_tar(
        tmp_path / "own/train-0.tar", {"1.jpg": b"", "1.cls": b"0", "2.jpg": b"", "2.cls": b"1"}
    )
    write_tar(tmp_path / "own/val-0.tar", {"1.jpg": b"", "1.cls": b"0"})
    write_tar(tmp_path / "own/test/0.tar", {"1.jpg": b"", "1.cls": b"2"})
    assert opened(tmp_path / "own", "val").classes == ("0", "1")
    with pytest.raises(UserError, match=r"the test shards in .*: label 2 is none of the 2 classes"):
        opened(tmp_path / "own", "test")
    (tmp_path / "own/classes.txt").write_text("ant\n \nbee\n")
    with pytest.raises(UserError, match=r"classes.txt' has a blank line before others: remove it"):
        opened(tmp_path / "own", "test")
    (tmp_path / "own/classes.txt").write_text("\ufeffant\nbee\ncat\n\n\n", encoding="utf-8")
    assert opened(tmp_path / "own", "test").classes == ("ant", "bee", "cat")
    with pytest.raises(UserError, match="has validation images of its own"):
        opened(tmp_path / "own", fold=1)


def test_undivided_images_are_divided_by_their_names_whatever_their_shards(tmp_path):
    members = {f"{'ab'[number % 2]}/{number}.jpg": b"" for number in range(60)}
    write_tar(tmp_path / "one/all.tar", members)
    halves = dict(list(members.items())[:30]), dict(list(members.items())[30:])
    for number, half in enumerate(halves):
        write_tar(tmp_path / f"two/train-{number}.tar", half)
    names = {}
    for root in ("one", "two"):
        for split in ("train", "val"):
            paths = opened(tmp_path / root, split, fold=1).paths
            found = {paths.relative(number).partition(b"/")[2] for number in range(len(paths))}
            names[root, split] = found
    assert names["one", "val"] == names["two", "val"]
    assert sorted(names["one", "train"] | names["one", "val"]) == sorted(map(str.encode, members))
    assert 4 < len(names["one", "val"]) < 25


def test_images_of_the_same_names_in_each_shard_are_divided_by_shard_and_name(tmp_path):
    for number in range(40):
        members = {f"{key}.jpg": b"" for key in range(8)} | {f"{key}.cls": b"0" for key in range(8)}
        write_tar(tmp_path / f"own/{number}.tar", members)
    train, val = (opened(tmp_path / "own", split, val_fraction=0.2) for split in ("train", "val"))
    assert len(train) + len(val) == 320
    for number in range(8):
        names = [path for path in map(val.name, range(len(val))) if path.endswith(f"/{number}.jpg")]
        assert 0 < len(names) < 30


def test_names_of_a_few_images_are_read_without_a_copy_of_all():
    name = b"ant/1.jpg"
    ends = len(name) * torch.arange(1, 100_001)
    names = torch.frombuffer(bytearray(name * len(ends)), dtype=torch.uint8)
    some = index.Index([], [], {"end": ends, "names": names})
    tracemalloc.start()
    assert [*some.names(torch.tensor([99_999, 0, 7]))] == [name] * 3
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < len(names) / 10


def test_a_name_that_is_there_twice_is_refused(tmp_path):
    shard = write_tar(tmp_path / "own/0.tar", {"0.jpg": b"", "0.cls": b"ant"})
    write_tar(shard, {"0.png": b"", "0.cls": b"bee"}, "a")  # as `tar -A` joins them
    with pytest.raises(UserError, match=r"own/0.tar' cannot be read: '0.cls' is there twice: pack"):
        opened(tmp_path / "own")
    write_tar(shard, {"ant/0.jpg": b"", "0.txt": b""})
    write_tar(shard, {"ant/0.jpg": b"", "0.txt": b""}, "a")
    with pytest.raises(UserError, match=r"own/0.tar' cannot be read: 'ant/0.jpg' is there twice"):
        opened(tmp_path / "own")


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE], ids=["hard", "symbolic"])
def test_an_image_that_is_a_link_is_refused(tmp_path, kind):
    shard = write_tar(tmp_path / "own/0.tar", {"ant/0.jpg": b""})
    link = tarfile.TarInfo("bee/1.jpg")
    link.type = kind
    link.linkname = "ant/0.jpg"
    with tarfile.open(shard, "a") as members:
        members.addfile(link)
    with pytest.raises(UserError, match=r"'bee/1.jpg' is a link: pack with `tar -h --hard-deref"):
        opened(tmp_path / "own")


def test_each_class_keeps_an_image_for_training_and_parts_have_other_names_too(tmp_path):
    few = {f"{number // 2}/{number}.jpg": b"" for number in range(80)}
    write_tar(tmp_path / "own/Training/0.tar", few)
    write_tar(tmp_path / "own/Testing/0.tar", {"1/1.jpg": b""})
    train, val, test = (opened(tmp_path / "own", split) for split in ("train", "val", "test"))
    assert len(train.labels.unique()) == len(train.classes) == 40
    assert len(train) + len(val) == 80
    assert len(test) == 1


def test_a_part_may_be_a_link_to_a_folder(tmp_path):
    write_tar(tmp_path / "elsewhere/0.tar", {"a/0.jpg": b"", "b/1.jpg": b""})
    write_tar(tmp_path / "own/train-0.tar", {f"{'ab'[n % 2]}/{n}.jpg": b"" for n in range(40)})
    (tmp_path / "own/val").symlink_to("../elsewhere")
    assert [len(opened(tmp_path / "own", split)) for split in ("train", "val")] == [40, 2]


def test_the_part_may_stand_within_the_name_of_a_shard(tmp_path):
    for name, count in (("imagenet1k-train-0", 6), ("imagenet1k-validation-0", 2)):
        members = {f"{'ab'[number % 2]}/{name}{number}.jpg": b"" for number in range(count)}
        write_tar(tmp_path / f"{name}.tar", members)
    assert [len(opened(tmp_path, split)) for split in ("train", "val")] == [6, 2]


def test_the_index_is_kept_and_made_again_when_a_shard_has_changed(photos, tmp_path, monkeypatch):
    root = pack(photos, tmp_path / "own")
    first = opened(root)
    before = first.file_digests
    (kept,) = Path(f"{root}.cache").glob("tar-*")
    content = kept.read_bytes()
    kept.write_bytes(content[:-9] + b"12345678\n")
    assert_same_images(opened(root), first)
    assert kept.read_bytes() == content
    shard = root / "train-000000.tar"
    os.utime(shard, (1, 1))
    assert opened(root).fingerprint() == first.fingerprint()
    digests = opened(root).file_digests
    assert digests == before
    write_tar(shard, {"0.cls": b"ant", "0.jpg": (photos / "train/bee/1.jpg").read_bytes()})
    with pytest.raises(FaultError, match=r"train-000000.tar' has changed since this run began"):
        first.read(5)
    assert len(opened(root)) == 7
    assert opened(root).file_digests != digests
    monkeypatch.setattr(index, "write_whole", Mock(side_effect=OSError(28, "No space left")))
    notes = opened(root, cache=str(tmp_path / "other")).notes
    assert re.search("the index of the shards is not kept in .*/other': No space left", notes[0])


def rewrite(shard, longer=False):
    """Write other bytes into a shard, in place, a second later."""
    status, content = shard.stat(), bytearray(shard.read_bytes())
    content[600:] = content[600:].replace(b"JFIF", b"JFXX") + bytes(10_240 * longer)
    with shard.open("r+b") as file:
        file.write(content)
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))


@pytest.mark.parametrize("longer", [False, True], ids=["as long", "longer"])
def test_a_run_ends_when_a_shard_is_rewritten_in_place(on_photos, packed, tmp_path, longer):
    root = Path(shutil.copytree(packed, tmp_path / "own"))
    knobs = {"data__name": "tar", "data__root": str(root), "data__limit": 0, "data__workers": 0}
    knobs |= {"augment__crop": "resized", "data__where": "stream"}
    knobs |= {f"data__{name}": word for name, word in SKIPPING.items()}
    with pytest.MonkeyPatch.context() as patch:
        shard = root / "train-000001.tar"
        after_each_step(patch, lambda log, _: log.step_done == 2 and rewrite(shard, longer))
        with pytest.raises(FaultError, match=r"train-000001.tar' has changed since this run"):
            train(changed(on_photos, **knobs))
    assert not Path(on_photos.run.dir, "bad_images.txt").exists()


@pytest.mark.parametrize("change", ["cut", "gone", "replaced"])
def test_no_image_is_blamed_for_its_shard(packed, tmp_path, change):
    root = Path(shutil.copytree(packed, tmp_path / "own"))
    shard, said = root / "train-000000.tar", "has changed"
    source, unread = opened(root), opened(root)
    source.read(0)
    if change == "cut":
        os.truncate(shard, 2048)
    else:
        shard.rename(root / "old")
        said = "is gone"
    if change == "replaced":
        write_tar(shard, {"ant/1.jpg": b"<html>"})
        said = "has changed"
    with pytest.raises(FaultError, match=rf"train-000000.tar' {said} since this run began to"):
        unread.read(2)
    if change == "cut":  # else it is still open
        with pytest.raises(FaultError, match=r"train-000000.tar' has changed since this run"):
            source.read(2)


def test_a_damaged_image_is_named(tmp_path):
    write_tar(tmp_path / "own/train-0.tar", {"ant/1.jpg": b"<html>"})
    source = opened(tmp_path / "own", val_fraction=0.001)
    with pytest.raises(BadImageError, match=r"own/train-0.tar/ant/1.jpg': not a JPEG"):
        source.read(0)


@pytest.mark.parametrize("place", [200, 512, 1536, 3000, "end"])
def test_a_cut_or_damaged_shard_is_refused(photos, tmp_path, refusal, place):
    shard = pack(photos, tmp_path / "own") / "train-000001.tar"
    content = shard.read_bytes()
    end = -(-len(content.rstrip(b"\0")) // 512) * 512  # of the last member
    shard.write_bytes(content[: end if place == "end" else place])
    words = f"train smoke --data.name tar --data.root {tmp_path}/own --run.dir {tmp_path}/run"
    said = refusal(*words.split())
    assert re.search(r"tar file '.*train-000001.tar' (cannot be read|is damaged)", said)
    shard.write_bytes(content[:1024] + b"?" * 512 + content[1536:])
    assert "damaged after 1,024 bytes: a member is" in refusal(*words.split())


def sparse(name, size):
    """The header of a member that has `size` zeros, and needs no bytes for them."""
    entry = tarfile.TarInfo(name)
    entry.type = tarfile.GNUTYPE_SPARSE
    head = bytearray(entry.tobuf(tarfile.GNU_FORMAT))
    head[483:495] = b"%011o " % size
    head[148:156] = b"%06o\0 " % (sum(head[:148]) + sum(head[156:]) + 8 * 32)
    return bytes(head)


def with_size(name, size):
    """The header of a member that says it has `size` bytes."""
    entry = tarfile.TarInfo(name)
    entry.size = size
    return entry.tobuf(tarfile.GNU_FORMAT)


PLAIN = tarfile.TarInfo("ant/1.jpg").tobuf()
FOREIGN = {
    "": (b"", "it is empty"),
    "HTML": (b"<!doctype html>\n<html>" * 99, r"it is no tar file, it begins with b'<!doctype htm"),
    "short": (b"Not found", "it is no tar file, it begins with b'Not found'"),
    "pointer": (
        b"version https://git-lfs.github.com",
        "it is no tar file, it begins with b'versio",
    ),
    "gzip": (gzip.compress(PLAIN + bytes(1024)), "it is compressed, and can't be read in part"),
    "bzip2": (bz2.compress(PLAIN + bytes(1024)), "it is compressed, and can't be read in part"),
    "xz": (lzma.compress(PLAIN + bytes(1024)), "it is compressed, and can't be read in part"),
    "zeros": (bytes(10_240), "there is no image in"),
    "sparse": (sparse("ant/1.jpg", 2**32) + bytes(1024), "'ant/1.jpg' is sparse: pack without"),
    "backwards": (
        PLAIN + with_size("ant/2.jpg", -512) + bytes(1024),
        "('ant/2.jpg' has a size of|a member is damaged)",  # newer Pythons refuse it
    ),
    "endless": (with_size("ant/2.jpg", 2**40) + bytes(1024), "unexpected end of data"),
    "two": ((PLAIN + bytes(1024)) * 2, "goes on after its end at 512: pack anew"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_no_tar_file_or_has_more_than_its_bytes_is_refused_in_a_line(name, tmp_path):
    content, said = FOREIGN[name]
    (tmp_path / "train-0.tar").write_bytes(content)
    with pytest.raises(UserError, match=rf"train-0.tar'.*{said}|{said}.*train-0.tar'") as caught:
        opened(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_large_label_is_refused_before_it_unpacks(tmp_path):
    image = tarfile.TarInfo("1.jpg").tobuf()
    (tmp_path / "train-0.tar").write_bytes(image + sparse("1.cls", 2**32) + bytes(1024))
    with pytest.raises(UserError, match=r"label '1.cls' of .*: it has 4,294,967,296 bytes"):
        opened(tmp_path)


def test_a_shard_without_an_image_is_told(tmp_path):
    for number, members in enumerate(({"ant/1.jpg": b""}, {"bee/2.jpg": b""}, {})):
        write_tar(tmp_path / f"own/train-{number}.tar", members)
    for _ in range(2):  # the second time from the index
        assert opened(tmp_path / "own", val_fraction=0.001).notes == ("no image in 'train-2.tar'",)


def test_a_shard_that_is_gone_is_named(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own/train-0.tar").symlink_to("nowhere")
    with pytest.raises(UserError, match=r"cannot read '.*own/train-0.tar': .*No such file"):
        opened(tmp_path / "own")
    (tmp_path / "own/train-0.tar").unlink()
    write_tar(tmp_path / "own/train-0.tar", {"ant/1.jpg": b""})
    (tmp_path / "own/classes.txt").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"cannot read '.*own/classes.txt': 'utf-8' codec"):
        opened(tmp_path / "own")


@pytest.mark.parametrize(
    ("root", "message"),
    [
        ("nowhere", "cannot list '.*nowhere'"),
        ("", "there are no tar files, train-000000.tar"),
        ("mixed", "is 'more.tar' of train, val or test"),
        ("mixed/more.tar", "more.tar' is one tar file: give its folder"),
        ("memory://x/train-0.tar", "train-0.tar' is one tar file: give its folder"),
        ("packed/train-0.tar.gz", "train-0.tar.gz' is one tar file: give its folder"),
        ("packed", "train-0.tar.gz' is compressed: unpack it to a .tar"),
        ("folders", "train/1.tgz' is compressed: unpack it to a .tar"),
        ("nofs://here", "Protocol not known: nofs"),
        ("~", "cannot list '~': "),
    ],
)
def test_what_is_no_dataset_is_refused(tmp_path, root, message):
    for name in ("more.tar", "val-0.tar"):
        write_tar(tmp_path / "mixed" / name, {"ant/1.jpg": b""})
    for name in ("packed/train-0.tar.gz", "packed/more.tar", "folders/train/1.tgz"):
        write_tar(tmp_path / name, {"ant/1.jpg": b""})
    with pytest.raises(UserError, match=message):
        opened(root if "://" in root or root == "~" else tmp_path / root)


@needs_fork  # in whose memory the shards are
def test_shards_in_memory_are_read_as_files_are(on_photos, packed, photos, tmp_path, monkeypatch):
    fsspec = pytest.importorskip("fsspec")
    monkeypatch.chdir(tmp_path)
    memory = fsspec.filesystem("memory")
    memory.put(f"{packed}/", "/shards", recursive=True)
    files = open_dataset(DataConfig(name="folder", root=str(photos)), "train")
    knobs = {"data__limit": 0, "data__workers": 2, "augment__crop": "resized"}
    knobs |= {"data__name": "tar", "data__root": "memory://shards"}
    assert_same_images(opened("memory://shards"), files)
    assert list(tmp_path.glob("shards-*.cache/tar-*"))
    local = changed(on_photos, **knobs | {"data__root": str(packed)})
    config = changed(on_photos, **knobs, run__dir=str(tmp_path / "elsewhere"))
    train(config)
    train(local)
    assert_same(weights(config), weights(local))


class Ranges(BaseHTTPRequestHandler):
    """Serves files in ranges, with a list of each folder; `fails` of the requests are refused."""

    fails, sent, root = 0, 0, None
    stamps = frozenset()  # the headers that tell when a file has changed

    def do_GET(self):
        """Send a file, a part of it, or the names in a folder."""
        kind = type(self)
        if kind.fails and "Range" in self.headers:
            kind.fails -= 1
            self.send_error(503)
            return
        path = Path(f"{self.root}{self.path}")
        if path.is_dir():
            links = (f'<a href="{name}">{name}</a>' for name in sorted(os.listdir(path)))
            content = "\n".join(links).encode()
        elif path.exists():
            content = path.read_bytes()
        else:
            self.send_error(404)
            return
        total, start, stop = len(content), 0, len(content)
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            start, stop = int(wanted[1]), min(int(wanted[2]) + 1, total)
            kind.sent += stop - start
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(stop - start))
        self.send_header("Accept-Ranges", "bytes")
        if not path.is_dir():
            seconds, nanoseconds = divmod(path.stat().st_mtime_ns, 10**9)
            found = {"ETag": f'"{seconds}-{nanoseconds}"', "Last-Modified": formatdate(seconds)}
            for name in kind.stamps:
                self.send_header(name, found[name])
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{total}")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[start:stop])

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_):
        """Nothing."""


@pytest.fixture
def served(packed, tmp_path, monkeypatch):
    """The URL of the shards."""
    pytest.importorskip("aiohttp")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Ranges, "root", packed)
    monkeypatch.setattr(ThreadingHTTPServer, "request_queue_size", 64)  # else one waits a second
    server = ThreadingHTTPServer(("127.0.0.1", 0), Ranges)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_shards_of_a_server_are_read_in_parts_and_failures_tried_again(served, packed, monkeypatch):
    source, files = opened(served), opened(packed)
    monkeypatch.setattr(Ranges, "fails", 2)
    source.prefetch(torch.arange(12).numpy())
    assert_same_images(source, files)
    assert Ranges.fails == 0
    monkeypatch.setattr(Ranges, "fails", 100)
    said = r"cannot read 'http.*/train-000001.tar': .*503.*; tried 4 times in 0 s; run the same"
    with pytest.raises(FaultError, match=said):
        opened(served).paths.read(11)
    monkeypatch.setattr(Ranges, "fails", 0)


@pytest.mark.parametrize("stamp", ["ETag", "Last-Modified", "its size", "gone"])
def test_a_shard_that_is_rewritten_on_a_server_ends_the_run(served, packed, tmp_path, stamp):
    root = Path(shutil.copytree(packed, tmp_path / "own"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranges, "root", root)
        patch.setattr(Ranges, "stamps", {stamp} & {"ETag", "Last-Modified"})
        source = pickle.loads(pickle.dumps(opened(served, **SKIPPING)))
        source.read(0)
        source.prefetch(np.arange(2))
        shard = root / "train-000000.tar"
        rewrite(shard, longer=stamp == "its size")
        if stamp == "gone":
            shard.unlink()
        source.prefetch(np.arange(1, 3))
        said = "is gone" if stamp == "gone" else "has changed"
        with pytest.raises(FaultError, match=rf"'http.*train-000000.tar' {said}.* since this run"):
            source.read(1)
        assert torch.equal(source.read(11), opened(packed).read(11))  # of another shard


def test_a_shard_that_is_rewritten_in_a_store_that_tells_only_if_asked_ends_the_run(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(storage, "RECHECK_SECONDS", 0)
    content = write_tar(tmp_path / "0.tar", {"ant/1.jpg": b"one"}).read_bytes()
    place = f"/{tmp_path.name}/train-0.tar"
    fsspec.filesystem("memory").pipe_file(place, content)
    source = opened(f"memory://{tmp_path.name}", val_fraction=0.001, cache=str(tmp_path / "c"))
    assert source.paths.read(0) == b"one"
    fsspec.filesystem("memory").pipe_file(place, content.replace(b"one", b"two"))
    with pytest.raises(FaultError, match=r"train-0.tar' has changed since this run began"):
        source.paths.read(0)


def test_only_headers_and_labels_are_read_for_the_index(served, tmp_path, monkeypatch):
    monkeypatch.setattr(index, "READ_AHEAD", 512)
    monkeypatch.setattr(Ranges, "root", tmp_path)
    write_tar(tmp_path / "train-0.tar", {f"ant/{n}.jpg": bytes(100_000) for n in range(20)})
    monkeypatch.setattr(Ranges, "sent", 0)
    opened(served)
    assert Ranges.sent < 60_000


def test_a_run_from_a_server_ends_as_from_files(served, packed, on_photos, tmp_path):
    local = changed(on_photos, data__name="tar", data__root=str(packed), augment__crop="resized")
    local = changed(local, data__limit=0, data__workers=2, epochs=1)
    config = changed(local, data__root=served, run__dir=str(tmp_path / "elsewhere"))
    train(config)
    train(local)
    assert_same(weights(config), weights(local))


def test_an_image_is_that_of_its_own_number_whatever_was_fetched_ahead(tmp_path):
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as shard:
        for number in range(20):
            file = io.BytesIO()
            Image.new("RGB", (8, 8), (number, 0, 0)).save(file, "PNG")
            entry = tarfile.TarInfo(f"ant/{number:02}.png")
            entry.size = file.tell()
            shard.addfile(entry, io.BytesIO(file.getvalue()))
    for split in ("train", "val"):
        fsspec.filesystem("memory").pipe_file(f"/{tmp_path.name}/{split}-0.tar", content.getvalue())
    data = DataConfig("tar", f"memory://{tmp_path.name}", cache=str(tmp_path))
    source = open_dataset(data, "train")
    some = source.thinned(5)
    before = [int(some.read(number)[0, 0, 0]) for number in range(5)]
    assert source.file_digests  # which fetches ahead
    assert [int(some.read(number)[0, 0, 0]) for number in range(5)] == before
