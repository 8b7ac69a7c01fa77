"""What a dataset's function may return, and what is said of anything else."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from image_classifier.config import DataConfig, UserError
from image_classifier.data.datasets import DATASETS, open_dataset
from image_classifier.data.datasets.paths import PathList
from image_classifier.data.datasets.source import Source

LABELS, CLASSES = torch.arange(6) % 2, ("ant", "bee")
PIXELS = torch.randint(256, (6, 4, 5, 3), generator=torch.Generator().manual_seed(0)).byte()
GREYS = PIXELS[..., 0]
FILES = ("ant/1.jpg", "bee/2.jpg", "3.jpg", "4.jpg", "5.jpg", "6.jpg")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], Source]:
    """A function that opens a dataset whose own function returns what the given one does."""

    def open_mine(make: Callable[[], object]) -> Source:
        monkeypatch.setitem(DATASETS, "mine", lambda _data, _split: make())
        return open_dataset(DataConfig(name="mine", root="nowhere"), "train")

    return open_mine


@pytest.mark.parametrize(
    ("field", "value", "fix"),
    [
        (
            "pixels",
            PIXELS.permute(0, 3, 1, 2) / 255,
            "(pixels * 255).round().byte().permute(0, 2, 3, 1)",
        ),
        ("pixels", PIXELS.permute(0, 3, 1, 2), "pixels.permute(0, 2, 3, 1)"),
        ("pixels", PIXELS.numpy(), "torch.from_numpy(pixels)"),
        ("pixels", PIXELS.long(), "pixels.byte()"),
        ("pixels", [*PIXELS], "torch.stack(pixels)"),
        ("pixels", GREYS, "pixels.unsqueeze(3).expand(-1, -1, -1, 3)"),
        ("pixels", GREYS[..., None], "pixels.expand(-1, -1, -1, 3)"),
        (
            "pixels",
            GREYS[:, None].numpy() / 255,
            "(torch.from_numpy(pixels) * 255).round().byte()"
            ".permute(0, 2, 3, 1).expand(-1, -1, -1, 3)",
        ),
        ("paths", [*FILES], "PathList(folder, paths)"),
        ("labels", LABELS.tolist(), "torch.tensor(labels)"),
        ("labels", LABELS.int(), "labels.long()"),
        ("labels", LABELS.int().numpy(), "torch.from_numpy(labels).long()"),
        ("labels", LABELS[:, None], "labels.flatten().long()"),
        ("labels", torch.eye(2)[LABELS], "labels.argmax(1)"),
        (
            "labels",
            np.array(CLASSES)[LABELS],
            "torch.tensor([classes.index(name) for name in labels])",
        ),
        ("classes", [*CLASSES], "tuple(map(str, classes))"),
        ("classes", tuple(np.array(CLASSES)), "tuple(map(str, classes))"),
        ("classes", {"ant": 0, "bee": 1}, "tuple(map(str, classes))"),
    ],
)
def test_what_people_commonly_have_is_refused_with_what_converts_it(
    opened: Callable, field: str, value: object, fix: str
) -> None:
    images = {"paths": PathList("photos", FILES)} if field == "paths" else {"pixels": PIXELS}
    right = {"labels": LABELS, "classes": CLASSES, **images}
    with pytest.raises(UserError) as caught:
        opened(lambda: Source(**right | {field: value}))
    said = str(caught.value)
    assert said.startswith("dataset 'mine', line ")
    assert f" of test_source.py: {field} should be " in said
    assert said.endswith(f": {field}={fix}")
    assert "\n" not in said
    names = {"torch": torch, "PathList": PathList, "folder": "photos", "classes": CLASSES}
    source = opened(lambda: Source(**right | {field: eval(fix, names | {field: value})}))
    assert torch.equal(source.labels, LABELS)
    assert source.classes == CLASSES
    if field == "paths":
        assert [str(source.paths[index]) for index in (0, 5)] == [
            "photos/ant/1.jpg",
            "photos/6.jpg",
        ]
    else:
        grey = GREYS[..., None].expand(-1, -1, -1, 3)
        assert torch.equal(source.pixels, grey if "expand" in fix else PIXELS)
        assert source.pixels.is_contiguous()  # else each batch would copy all images


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pixels": None}, "pixels or in paths, not in neither"),
        ({"paths": PathList("photos", FILES)}, "pixels or in paths, not in both"),
        ({"pixels": PIXELS[:5]}, "6 labels, but 5 images"),
        ({"pixels": PIXELS.flatten(1)}, r"uint8 of 0 to 255, not \(6, 60\) uint8$"),
        ({"pixels": PIXELS.short()}, r"not \(6, 4, 5, 3\) int16$"),
        ({"classes": "ant"}, "a tuple of text, the name of each class, not 'ant'$"),
        ({"classes": ()}, "a tuple of text, the name of each class, not "),
        ({"labels": None}, r"labels should be a tensor \(count,\) int64, not None$"),
        ({"mean": 0.5}, "mean should be three numbers.* not 0.5$"),
        ({"mean": (125.3, 123.0, 113.9)}, r": mean=tuple\(value / 255 for value in mean\)$"),
        ({"std": (0.2, 0.2)}, "std should be three numbers"),
        ({"std": (0.2, 0.0, 0.2)}, "std should be three numbers"),
        ({"std": (0.2, float("nan"), 0.2)}, "std should be three numbers"),
    ],
)
def test_what_no_source_can_hold_is_refused(opened: Callable, fields: dict, message: str) -> None:
    right = {"labels": LABELS, "classes": CLASSES, "pixels": PIXELS}
    with pytest.raises(UserError, match=message):
        opened(lambda: Source(**right | fields))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "returned nothing"),
        ((PIXELS, LABELS), "returned a tuple"),
        (TensorDataset(PIXELS, LABELS), "returned a TensorDataset, which is a torch Dataset"),
    ],
)
def test_a_dataset_that_is_no_source_is_told_what_to_return(
    opened: Callable, returned: object, message: str
) -> None:
    with pytest.raises(UserError, match=rf"dataset 'mine' {message}: .*return Source\(labels"):
        opened(lambda: returned)


def test_a_bug_in_a_dataset_is_told_with_its_name_and_line(opened: Callable) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        opened(lambda: 1 / 0)
    (note,) = caught.value.__notes__
    assert note.startswith("dataset 'mine', line ")
    assert note.endswith(" of test_source.py, asked for the split 'train'")


def test_a_search_for_files_that_finds_none_is_told(opened: Callable) -> None:
    with pytest.raises(UserError, match="a PathList of no paths below 'photos'"):
        opened(lambda: Source(LABELS, CLASSES, paths=PathList("photos", [])))


def test_a_dataset_draws_the_same_whoever_asks(opened: Callable) -> None:
    one, other = (
        opened(lambda: Source(torch.randperm(6), CLASSES, PIXELS)).labels for _ in range(2)
    )
    assert torch.equal(one, other)


def test_means_are_kept_as_a_checkpoint_keeps_them() -> None:
    source = Source(LABELS, CLASSES, PIXELS, mean=np.zeros(3), std=torch.ones(3))
    assert (source.mean, source.std) == ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    assert {type(value) for value in source.mean + source.std} == {float}
