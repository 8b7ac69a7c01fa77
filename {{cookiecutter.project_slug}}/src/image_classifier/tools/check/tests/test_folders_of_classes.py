"""Folders that are no classes end a run before its first step, in a line that says why."""

import pytest
from test_datasets import names, opened, put
from test_folders import fill

from image_classifier.errors import UserError
from image_classifier.tools.check.folders import part_names


@pytest.mark.parametrize(
    ("folders", "cure"),
    [
        ("PetImages/{Cat,Dog}", "--data.root '{}/PetImages'"),
        ("a/b c/{Cat,Dog}", "--data.root '{}/a/b c'"),
        ("images/{train,val}/{a,b}", "--data.root '{}/images'"),
        ("x/{Training,Testing}/{a,b}", "--data.root '{}/x'"),
        ("x/{Training,Testing}/{a,b}; papers", "--data.root '{}/x'"),
        ("train/{train,val}/{a,b}", "--data.root '{}/train'"),
        ("{train,val}/images/{a,b}", "move the folders in '{0}/train/images' up to '{0}/train'"),
        ("train/images/{a,b}", "--data.root '{}/train/images'"),
        ("{bottle,cable}/{train,test}", "or move 'bottle/train' to 'train/bottle'"),
        ("{cat,dog}; old/{Cat,dog}", "'old' in '{}' is no class, .* the classes 'Cat', 'dog'"),
        ("{train_a,test_b}/cat", "a folder 'test_b' but none called 'train'"),
        ("cat; dog; validation_data/cat", "a folder 'validation_data' but none called"),
        ("{train_1,train_2}/cat", "a folder 'train_1' but none called 'train'"),
        ("other/ant; val/ant", "a folder 'val' but none called"),
    ],
)
def test_a_wrapper_or_a_part_is_never_a_class(tmp_path, folders, cure):
    fill(root := tmp_path / "own", folders)
    put(root, "notes/readme.txt") if "PetImages" in folders else None
    for split in ("train", "val")[: 1 + ("val" not in folders)]:
        with pytest.raises(UserError, match=cure.format(root)) as caught:
            opened(root, split)
        assert "\n" not in str(caught.value)


def test_a_folder_is_no_class_only_where_that_is_certain():
    assert not part_names(["steam_train", "bus", "car"])
    assert not part_names(["steam_train", "bullet_train"])
    assert part_names(["train_1", "train_2"]) == ["train_1", "train_2"]
    assert part_names(["a_train", "b_test", "extra"]) == ["a_train", "b_test"]
    assert not part_names(["crash_test", "trains", "invalid", "contest", "train_station"])
    assert not part_names(["train_a", "test_b", "cat", "dog"])  # half of them are not most
    assert part_names(["cat", "Valid"]) == ["Valid"]


def test_links_that_lead_nowhere_are_told(tmp_path):
    fill(tmp_path, "train/{ant,bee}")
    (tmp_path / "val").symlink_to("unmounted/val")
    (tmp_path / "train" / "cat").symlink_to("cat")  # to itself
    told = [line for line in opened(tmp_path, "train").notes if "links" in line]
    where, cat = f"'{tmp_path}/val' to 'unmounted/val'", f"'{tmp_path}/train/cat' to 'cat'"
    assert told == [
        f"warning: links in '{tmp_path}' that lead nowhere: 1, such as {where}",
        f"warning: links in '{tmp_path}/train' that lead nowhere: 1, such as {cat}",
    ]


def test_what_lies_beside_the_parts_and_is_not_used_is_told(tmp_path):
    fill(tmp_path, "train/{ant,bee}; holdout/ant; .old/ant; train/__cat; .venv/lib; seg_pred")
    put(tmp_path, "1.jpg", "train/2.jpg", "notes/1.txt")
    told = opened(tmp_path, "train").notes[1:]
    hidden = "not used: a name that begins with '.' or '__' is no class, rename it"
    cure = "rename it to 'val' for validation, or move the classes in it to 'train'"
    assert [line.replace(f"{tmp_path}", "root") for line in told] == [
        "warning: 1 images in 'root' are not used: they are in no class",
        f"warning: 6 images in 'root/.old' are {hidden}",
        f"warning: 6 images in 'root/holdout' are not used: {cure}",
        "warning: 6 images in 'root/seg_pred' are not used, as they have no labels",
        "warning: 1 images in 'root/train' are not used: they are in no class",
        f"warning: 6 images in 'root/train/__cat' are {hidden}",
    ]
    fill(tmp_path, "{val,valid}/{ant,bee}")
    told = opened(tmp_path, "train").notes
    assert f"'{tmp_path}/valid' are not used: the val folder is 'val'; rename" in "".join(told)
    assert len(names(tmp_path, "val")) == 12
    fill(tmp_path, "seg_test/ant; bee")
    told = "".join(opened(tmp_path, "train").notes)
    assert f"'{tmp_path}/seg_test' are not used: rename it to 'test'" in told
    assert f"'{tmp_path}/bee' are not used: move it into '{tmp_path}/train', which has" in told


def test_of_two_folders_for_training_both_are_named_with_the_rename(tmp_path):
    fill(tmp_path, "{train,Train}/{ant,bee}")
    assert opened(tmp_path, "train").notes[1:] == (
        f"warning: 12 images in '{tmp_path}/Train' are not used: the train folder is 'train'; "
        "rename that to use these, or merge them",
    )


def test_classes_may_hold_folders_but_that_is_told(tmp_path):
    fill(tmp_path, "{ant,bee}/day{1,2}; cat", 12)
    source = opened(tmp_path, "train")
    assert source.classes == ("ant", "bee", "cat")
    assert "warning: 2 of 3 classes hold folders alone: all images" in source.notes[-1]
    assert f"are the classes, --data.root '{tmp_path}/ant'" in source.notes[-1]
    fill(tmp_path / "halves", "{dev,eval}/{ant,bee}")
    told = opened(tmp_path / "halves", "train").notes[-1]
    assert "if these are the classes, and 'dev', 'eval' parts of a dataset, rename those to" in told
    fill(tmp_path / "other", "{ant,bee}/images")  # no folders to choose from
    assert len(opened(tmp_path / "other", "train").notes) == 1


def test_files_that_are_no_images_by_their_suffix_are_told(tmp_path):
    fill(tmp_path, "ant; bee")
    put(tmp_path, "ant/1.avif", "ant/x/2.HEIC", "bee/3", "bee/notes.txt")
    note = "warning: files that cannot be read as images: 1 without a suffix, 1 .avif, 1 .heic"
    assert opened(tmp_path, "train").notes[-1] == note


def test_two_classes_whose_names_look_alike_are_told(tmp_path):
    fill(tmp_path, "train/{Cat,cat,dog}; val/{Cat,dog}")
    told = "warning: 'Cat' and 'cat' are two classes; if they are one, merge them"
    assert opened(tmp_path, "train").notes == (told,)
