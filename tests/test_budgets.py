"""How much there is to read, and that it does not grow unnoticed. `pytest -s` prints the table."""

import re
import sys
from pathlib import Path

import numpy as np
from conftest import PROJECT, ROOT, write_photos
from image_classifier import cli
from image_classifier.config import Config
from image_classifier.data import TrainData
from image_classifier.data.batch import Augmented, Batch
from image_classifier.extensions import of_tools
from image_classifier.runtime.config_dict import flatten
from torch import Tensor

from pretuned_answers import tools

PACKAGE = PROJECT / "src" / "image_classifier"
# Lines: what they are at most now, and what they should be; lower the first with the lines.
BUDGETS = {
    "story: the files at the top": (1_757, 2_000),
    "core: all but tools": (9_284, 7_500),
    "the largest tool": (800, 800),
    "a project with few tools": (11_468, 8_500),
    "a project with the usual ones": (15_897, 10_500),
    "options of the core": (54, 56),
}
# What has the bytes or the pixels of a photograph, from the disk to the network, in one process.
ON_THE_WAY = """
    runtime/files data/datasets/paths data/datasets/source data/decode data/arrays data/crops
    data/samples data/shared_memory data/batch data/loader
    augment preprocess tasks train tools/policies/policy tools/mixup/batches
"""


def count(files):
    """The lines of files, without their tests."""
    files = [file for file in files if "tests" not in file.relative_to(PACKAGE).parts]
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def files_of(size):
    """The files of the tools of a size, and of what these need."""
    for name in tools.with_needs(PROJECT, tools.chosen(PROJECT, size)):
        path = tools.there(PROJECT)[name]
        yield from [path] if path.is_file() else path.rglob("*.py")


def lengths():
    """What each budget is of, counted."""
    everything = [*PACKAGE.rglob("*.py")]
    folders = [folder for folder in (PACKAGE / "tools").iterdir() if folder.is_dir()]
    core = count(file for file in everything if PACKAGE / "tools" not in file.parents)
    return {
        "story: the files at the top": count(PACKAGE.glob("*.py")),
        "core: all but tools": core,
        "the largest tool": max(count(folder.rglob("*.py")) for folder in folders),
        "a project with few tools": core + count(files_of("few")),
        "a project with the usual ones": core + count(files_of("usual")),
        "options of the core": len(flatten(Config()).keys() - of_tools().keys()),
    }


def test_the_package_does_not_grow_unnoticed():
    found = lengths()
    for name, number in found.items():
        most, wanted = BUDGETS[name]
        print(f"{name:<32}{number:>7,}  at most {most:,}, wanted {wanted:,}")
    assert not {name for name, number in found.items() if number > BUDGETS[name][0]}


def test_the_readme_says_how_much_there_is_to_read():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    story = re.search(r"`train\.py` and (\d+) files beside it, ([\d,]+) lines", readme)
    rest = re.search(
        r"Without tests a project has ([\d,]+) lines, ([\d,]+) with `tools=few`", readme
    )
    found = lengths()
    parts = "story: the files at the top", "a project with the usual ones"
    parts += ("a project with few tools",)
    lines = tuple(f"{round(found[part], -2):,}" for part in parts)
    beside = len([*PACKAGE.glob("*.py")]) - 1
    assert (*story.groups(), *rest.groups()) == (str(beside), *lines)


def test_a_streamed_photograph_crosses_these_files_on_its_way_to_the_network(tmp_path, monkeypatch):
    write_photos(tmp_path, 64, 8)
    crossed = {}
    batches = TrainData.batches

    def note(frame, _event, result):
        path = Path(frame.f_code.co_filename)
        if PACKAGE / "models" in path.parents:
            sys.setprofile(None)  # it is there
        elif PACKAGE in path.parents and any(map(has_pixels, (result, *frame.f_locals.values()))):
            crossed[str(path.relative_to(PACKAGE).with_suffix(""))] = True

    def noted(*place):
        for number, batch in enumerate(batches(*place), 1):
            yield batch
            if number == 4:  # nothing begins or ends with the fifth
                sys.setprofile(note)

    monkeypatch.setattr(TrainData, "batches", noted)
    words = f"folder --data.root {tmp_path} --data.image-size 32 --data.batch-size 8 --epochs 1"
    words += " --data.where stream --data.workers 0 --model.name resnet9 --model.width 8"
    words += f" --precision fp32 --optim.warmup-epochs 0 --run.trackers --run.dir {tmp_path}/run"
    before = sys.getprofile()
    try:
        assert cli.main(["train", *words.split()]) == 0
    finally:
        sys.setprofile(before)
    print(f"a photograph crosses {len(crossed)} files, wanted 12: {', '.join(crossed)}")
    assert sorted(crossed) == sorted(ON_THE_WAY.split())


def has_pixels(value):
    """Whether this is a JPEG file, rows of pixels, or a batch of them."""
    if isinstance(value, (Batch, Augmented)):
        return True
    if isinstance(value, (Tensor, np.ndarray)):
        return value.ndim >= 3
    return isinstance(value, (bytes, memoryview)) and bytes(value[:2]) == b"\xff\xd8"
