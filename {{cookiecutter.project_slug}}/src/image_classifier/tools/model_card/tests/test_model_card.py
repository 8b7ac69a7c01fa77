"""A model card says what the files of a run say, and Hugging Face can read it."""

import json
import math
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import HOSTILE, changed
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from image_classifier.checkpoints.reading import read_checkpoint
from image_classifier.cli import main
from image_classifier.config import Config
from image_classifier.data import LEFT_OUT, Source
from image_classifier.extensions import of_tools
from image_classifier.metrics import Decision
from image_classifier.presets import finetune
from image_classifier.runtime.command_line import (
    parse,
    take_preset,
)
from image_classifier.runtime.config_dict import flatten
from image_classifier.runtime.console import printable
from image_classifier.train import train

for tool in ("config_file", "runs"):  # which it needs
    pytest.importorskip(f"image_classifier.tools.{tool}")
TOOL = "image_classifier.tools.model_card"
yaml_lines = pytest.importorskip(f"{TOOL}.markup").yaml_lines
carding = pytest.importorskip(f"{TOOL}.card")
origin = pytest.importorskip(f"{TOOL}.origin")
facts = pytest.importorskip(f"{TOOL}.facts")
sections = pytest.importorskip(f"{TOOL}.sections")

NAMES = (
    *HOSTILE,
    "a|b",
    "---",
    '"x": y',
    "two\nlines\n\n# head",
    "www.evil.com",
    "![a](b) `c` $d$",
)


def write(folder, *words):
    """Write the card of a run; return its text."""
    assert main(["model-card", str(folder), *words]) == 0
    return Path(folder, "README.md").read_text(encoding="utf-8")


def cells(text):
    """The rows of all tables, as their cells."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in lines]


def section(text, head):
    """What follows a head, until the next heading or table that has one."""
    return re.split(r"\n## |\nMost often", text.partition(head)[2])[0]


def wilson(right, count):
    """The interval by its formula: https://en.wikipedia.org/wiki/Binomial_proportion_confidence."""
    share, z = right / count, 1.959964
    middle = share + z**2 / (2 * count)
    width = z * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    low, high = (abs(middle + sign * width) / (1 + z**2 / count) for sign in (-1, 1))  # no -0.0
    return f"{share:.1%} ({100 * low:.1f} .. {100 * high:.1f})"


def renamed(folder, classes):
    """The run in a folder, with other names of its classes."""
    path = Path(folder, "checkpoints", "best.pt")
    torch.save(read_checkpoint(path) | {"classes": list(classes)}, path)
    path = Path(folder, "predictions.safetensors")
    tensors = load_file(path)
    about = {"step": read_checkpoint(Path(folder, "checkpoints", "best.pt"))["state"]["step"]}
    about |= {"images": "0", "files": {}, "classes": classes}
    save_file(tensors, path, {"about": json.dumps(about)})


def test_the_front_matter_is_what_hugging_face_reads(finished):
    hub = pytest.importorskip("huggingface_hub")
    Path(finished.run.dir, "test.json").write_text('{"test/top1": 0.25, "test/loss": 2.0}')
    write(finished.run.dir, "--license", "apache-2.0")
    card = hub.ModelCard.load(Path(finished.run.dir, "README.md"))
    assert card.data.license == "apache-2.0"
    assert card.data.pipeline_tag == "image-classification"
    assert card.data.model_name == Path(finished.run.dir).name
    results = {(found.dataset_split, found.metric_name): found for found in card.data.eval_results}
    status = json.loads(Path(finished.run.dir, "status.json").read_text())["result"]
    top1 = results["validation", "top-1"]
    assert (top1.task_type, top1.metric_type) == ("image-classification", "accuracy")
    assert top1.metric_value == round(status["val/top1"], 4)
    assert results["validation", "Brier score"].metric_value == round(status["val/brier"], 4)
    assert results["test", "top-1"].metric_value == 0.25
    assert "base_model" not in card.data.to_dict()
    assert "## Results" in card.text


def test_the_model_index_has_finite_numbers_of_a_folder_of_images():
    known = SimpleNamespace(config=changed(Config(), data__name="folder"), dataset="photos")
    found = carding.result_of(known, "validation", {"top1": 0.5, "loss": math.nan})
    assert found["dataset"] == {"type": "imagefolder", "name": "photos", "split": "validation"}
    assert [metric["name"] for metric in found["metrics"]] == ["top-1"]


def test_the_lines_that_use_it_have_the_name_of_its_folder_in_quotes(monkeypatch):
    monkeypatch.setattr(sections, "find_tool", lambda *_: sections)  # all are there
    text = sections.use_section(SimpleNamespace(name="my run's"))
    (shell,) = re.findall("```sh\n(.*)\n```", text)
    assert shlex.split(shell)[-2:] == ["my run's", "photo.jpg"]
    assert 'load("my run\'s").predict(' in text


def test_yaml_says_what_it_was_given():
    yaml = pytest.importorskip("yaml")
    value = {"a": [{"b": [1, 2.5, "x"], "c": {"d": "e"}}, "f"], "g": [[1], {"h": "i"}], "j": "no"}
    assert yaml.safe_load("\n".join(yaml_lines(value))) == value
    for name in NAMES:
        assert yaml.safe_load("\n".join(yaml_lines({"name": [name]}))) == {
            "name": [printable(name)]
        }


def test_scores_and_intervals_are_those_of_the_predictions(finished):
    text = write(finished.run.dir)
    found = load_file(Path(finished.run.dir, "predictions.safetensors"))
    predicted, target = found["predicted"], found["target"]
    rows = {row[0]: row[1:] for row in cells(section(text, "On the validation images:"))}
    for number, name in enumerate(classes_of(finished)):
        own, taken = target == number, predicted == number
        hits = int((own & taken).sum())
        precision = wilson(hits, int(taken.sum())) if taken.any() else ""
        assert rows[name][:3] == [f"{int(own.sum())}", wilson(hits, int(own.sum())), precision]
    whole = wilson(int((predicted == target).sum()), len(target))
    assert f"| top-1 | {whole} |" in text
    low, high = map(float, re.findall(r"\d[\d.]*", whole.partition("(")[2]))
    (points,) = re.findall(r"the share that is right to ([\d.]+) points", text)
    assert float(points) == pytest.approx((high - low) / 2, abs=0.11)
    recalls = [float(row[1].partition("%")[0]) for row in [*rows.values()][2:] if row[1]]
    assert recalls == sorted(recalls)
    assert len(recalls) > 5
    pairs = torch.stack([target, predicted])[:, predicted != target].T.tolist()
    true, taken, count = cells(section(text, "Most often confused:"))[2]
    classes = classes_of(finished)
    counts = [pairs.count(pair) for pair in pairs]
    assert int(count) == max(counts) == pairs.count([classes.index(true), classes.index(taken)])
    images = {row[0]: row[1:] for row in cells(section(text, "## Images"))}
    assert sum(int(images[name][0]) for name in classes) == 64
    assert "At most 64 images of each split were used." in section(text, "## Images")
    assert f"{sum(w.numel() for w in weights(finished)):,}, of step " in text


def classes_of(config):
    """The classes of a run."""
    return read_checkpoint(Path(config.run.dir, "checkpoints", "best.pt"))["classes"]


def weights(config):
    """The weights of a run without buffers: its network has GroupNorm, and so none."""
    state = read_checkpoint(Path(config.run.dir, "checkpoints", "best.pt"))["state"]
    return state["model"].values()


def test_hostile_names_of_classes_stay_text(finished):
    markdown = pytest.importorskip("markdown_it")
    renamed(finished.run.dir, NAMES)
    assert len(NAMES) == 10
    text = write(finished.run.dir)
    assert "The training images were not there, or not the same" in text
    tokens = markdown.MarkdownIt("gfm-like", {"linkify": False}).parse(text.split("\n---\n", 1)[1])
    inner = [token for token in tokens if token.type == "inline"]
    children = {child.type for token in inner for child in token.children}
    assert children <= {"text", "text_special", "code_inline", "softbreak"}
    assert {token.type for token in tokens if "html" in token.type} <= {"html_block"}  # the seal
    shown = {"".join(child.content for child in token.children) for token in inner}
    assert {printable(name) for name in NAMES} <= shown
    assert not re.search(r"www\.evil|https?://example", text)


def test_training_images_are_counted_while_they_are_those_of_the_run(on_photos, photos, tmp_path):
    root = shutil.copytree(photos, tmp_path / "photos")
    train(config := changed(on_photos, data__root=str(root), data__limit=0))
    text = write(config.run.dir)
    assert "photos: 12 for training, 4 for validation." in text
    assert str(root) not in text
    assert "At most" not in text
    assert "Only the last part of each path is shown." in section(text, "## Training")
    assert ["ant", "6", "2"] in cells(section(text, "## Images"))
    assert "2 of 2 classes have fewer than 30 training images; ant has 6." in text
    next(root.glob("train/ant/*")).unlink()
    text = write(config.run.dir)
    assert "photos: 4 for validation." in text
    assert ["ant", "2"] in cells(section(text, "## Images"))
    assert "not the same, when this page was written" in text


def test_the_command_trains_with_the_same_config(config):
    known = changed(finetune(), data__root="/home/me/photos", epochs=3.0)
    if "data.groups" in of_tools():
        known = changed(known, data__groups="/([^/]+)_")
    known = changed(known, optim__warmup_epochs=0.1875, seed=4, run__patience=2)
    assert known.run.evaluate_every_epochs == 1
    for own, root in ((known, "photos"), (config, "data")):
        words = shlex.split(origin.command_line(own))
        words = words[words.index("train") + 1 :] if "train" in words else words[1:]
        _, preset = take_preset(words, "")
        found = parse(Config, words, prog="", about="", default=preset)
        same = {k: v for k, v in flatten(own).items() if not k.startswith(origin.OF_MACHINE)}
        wanted = same | {"data.root": root, "run.best_by": found.run.best_by}
        assert {k: v for k, v in flatten(found).items() if k in same} == wanted
    words = shlex.split(origin.command_line(known))
    assert len(words) < 16
    assert {"--seed", "--run.patience"} < {*words}
    own = ("augment.", "model.", "optim.", "precision", "deterministic", "data.batch_size")
    untold = [knob for knob in flatten(known) if knob.startswith(origin.OF_MACHINE)]
    assert not [knob for knob in untold if knob.startswith(own)]  # as they change results


def test_a_page_that_was_changed_is_kept(finished, refusal, tmp_path):
    folder = finished.run.dir
    path = Path(folder, "README.md")
    assert "This model: not said (`--license`)." in write(folder)
    text = write(folder, "--license", "mit")  # its own
    assert 'license: "mit"' in text
    assert "\nThis model: mit. It began with random weights." in text
    for mine in ("mine", text.replace("## License", "## Terms"), text + "\n"):
        path.write_text(mine)
        assert "--fresh overwrites it" in refusal("model-card", folder)
        assert path.read_text() == mine
    assert main(["model-card", folder, "--out", str(tmp_path / "card.md")]) == 0
    assert (tmp_path / "card.md").read_text().startswith('---\nlibrary_name: "pytorch"\n')
    assert "## License" in write(folder, "--fresh")
    assert not list(Path(folder).glob("*.tmp"))


def test_what_is_no_finished_run_is_refused_in_a_line(finished, refusal, tmp_path):
    folder = Path(finished.run.dir)
    assert "can't be read as a run" in refusal("model-card", tmp_path)
    assert "'GPL 3' is no identifier" in refusal("model-card", folder, "--license", "GPL 3")
    path = folder / "predictions.safetensors"
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["about"])
    save_file(load_file(path), path, {"about": json.dumps(about | {"step": about["step"] + 1})})
    assert "run its command again" in refusal("model-card", folder)
    path.unlink()
    assert "has no predictions.safetensors" in refusal("model-card", folder)
    assert not (folder / "README.md").exists()


def test_it_says_of_which_size_images_were_in_training_and_are_in_use():
    config = changed(Config(), data__image_size=32, data__test_size=48)
    loaded = SimpleNamespace(classes=("ant",), origin="of step 3")
    about = {"name": "a", "num_weights": 1, "is_multi_label": False}
    text = sections.about_section(SimpleNamespace(config=config, loaded=loaded, **about))
    assert "- input: 48 x 48 pixels, 3 channels\n- trained with: 32 x 32 pixels\n" in text


def test_it_tells_how_training_went_and_neither_the_machine_nor_files(monkeypatch):
    monkeypatch.setattr(sections, "command_line", lambda _: "train")
    known = {"torch": "2.14", "platform": "my machine", "changed": "M mine.py", "commit": ""}
    run = SimpleNamespace(seconds=125.0, state="done")
    config = changed(Config(), seed=7, epochs=2.5)
    card = SimpleNamespace(config=config, environment=known, run=run)
    text = sections.training_section(card)
    rows = "- epochs: 2.5\n- seed: 7\n- time: 2:05 of training, without evaluations\n"
    rows += "- ended: done\n- torch: 2.14\n\nThe code had changes that are not in the commit."
    assert text.endswith(rows)


def test_unread_images_few_of_a_class_and_what_two_sides_may_share_are_among_its_limits():
    loaded = SimpleNamespace(decision=Decision(), classes=())
    nothing = {"parts": {}, "test_metrics": {}, "is_multi_label": False}
    known = {"config": Config(), "metrics": {"bad_images": 2}, "right": facts.Share(6, 8)}
    shares = {"ant": (facts.Share(1, 5), facts.Share(1, 90)), "bee": (facts.Share(1, 30),) * 2}
    known["classes"] = [facts.ClassRow(name, *own) for name, own in shares.items()]
    text = sections.limits_section(SimpleNamespace(loaded=loaded, **nothing, **known))
    assert text.endswith("\n- 2 validation images could not be read, and do not count.")
    assert "\n- 1 of 2 classes have fewer than 30 validation images; ant has 5.\n" in text
    assert "\n- Images of one camera, place or object may be on both sides: " in text


def test_it_tells_how_images_were_divided():
    data = {"val_fraction": 0.2, "fold": 3, "test_fraction": 0.1, "groups": "/(.*)_", "limit": 0}
    known = {"config": SimpleNamespace(data=SimpleNamespace(**data)), "dataset": "photos"}
    known |= {"parts": {}, "classes": [], "loaded": SimpleNamespace(classes=())}
    known["predictions"] = SimpleNamespace(target=[0, 1])
    text = sections.data_section(SimpleNamespace(**known))
    assert "photos: 2 for validation." in text
    assert "For validation: a share of 0.2 (number 3) of the training images, " in text
    assert "For the test: a share of 0.1, held out before all else." in text
    assert "Images of one group are in one split: /(.\\*)\\_ finds it in a path." in text


def test_a_label_has_the_probability_from_which_on_it_counts():
    loaded = SimpleNamespace(decision=Decision(thresholds=(0.25, 2.0)))
    shares = facts.Share(1, 2), facts.Share(1, 1)
    classes = [facts.ClassRow(name, *shares) for name in ("ant", "bee")]
    card = SimpleNamespace(loaded=loaded, classes=classes, is_multi_label=True)
    found = [(row[0], row[-1]) for row in cells(sections.class_table(card))[2:]]
    assert found == [("ant", "25.0%"), ("bee", "never")]
    loaded.decision = Decision()
    assert {len(row) for row in cells(sections.class_table(card))} == {4}


def test_classes_without_validation_images_come_last():
    loaded = SimpleNamespace(decision=Decision())
    counts = {"none": 0, "ant": 2}
    classes = [facts.ClassRow(n, *(facts.Share(count, count),) * 2) for n, count in counts.items()]
    card = SimpleNamespace(loaded=loaded, classes=classes, is_multi_label=False)
    rows = cells(sections.class_table(card))[2:]
    assert [row[:2] for row in rows] == [["ant", "2"], ["none", "0"]]


@pytest.mark.parametrize(
    ("thresholds", "said"),
    [
        ((), "every prediction counts."),
        ((0.875,), "abstains below a probability of 87.50%."),
        ((2.0,), "abstains always."),
    ],
)
def test_it_says_when_a_prediction_counts(finished, thresholds, said):
    pytest.importorskip("image_classifier.tools.calibration")
    path = Path(finished.run.dir, "checkpoints", "best.pt")
    saved = read_checkpoint(path)
    saved["state"]["decision"] = {"temperature": 1.5, "thresholds": thresholds}
    torch.save(saved, path)
    text = write(finished.run.dir)
    assert "divides logits by a temperature of 1.5" in text
    assert said in text
    chosen = ", the thresholds" if thresholds else ""
    assert f"validation images: the best weights, the temperature{chosen}.\n" in text
    assert ("It takes every image for one of its classes" in text) == (not thresholds)


def test_the_library_of_a_network_is_named():
    names = {"resnet9": "", "resnet18": "torchvision", "timm/resnet18": "timm"}
    assert {name: origin.library_of(name) for name in names} == names


def test_weights_that_it_began_with_are_named_with_their_license():
    pretrained = finetune()
    base = origin.base_of(pretrained)
    assert "IMAGENET1K\\_V1 of torchvision, which names no license" in base.license
    assert base.hub == ""
    file = changed(pretrained, run__init_from="/home/me/weights.pt")
    assert origin.base_of(file).license.startswith(
        "It began with the weights of the file weights.pt,"
    )
    assert origin.base_of(Config()).license == "It began with random weights."


def test_weights_of_timm_have_the_license_that_timm_says():
    pytest.importorskip("timm")
    pytest.importorskip("image_classifier.tools.timm")
    names = {
        "resnet18.a1_in1k": "apache-2.0",
        "vit_small_patch16_dinov3.lvd1689m": "dinov3-license",
    }
    for name, license_ in names.items():
        base = origin.base_of(changed(finetune(), model__name=f"timm/{name}"))
        assert base.hub == f"timm/{name}"
        assert f"license: {license_};" in base.license


def test_a_test_part_has_its_score_and_interval(on_photos, capsys):
    pytest.importorskip("image_classifier.tools.holdout")
    config = changed(on_photos, data__root=f"{on_photos.data.root}/train", data__limit=0)
    config = changed(config, data__test_fraction=0.3, data__val_fraction=0.4, data__batch_size=2)
    train(config)
    (said,) = re.findall(r"top-1 within (.*)% \(95 %\); (\d+) images", capsys.readouterr().out)
    interval, count = said
    text = write(config.run.dir)
    (row,) = [row for row in cells(text) if row[0] == "top-1"]
    assert f"({interval.replace('%', '')})" in row[2]
    assert f"{count} for test." in text
    assert "No test images were scored" not in text


def test_the_weights_of_a_linear_probe_are_of_no_step(config, trained_once):
    pytest.importorskip("image_classifier.tools.linear_probe")
    best = str(trained_once / "checkpoints" / "best.pt")
    train(changed(config, run__init_from=best, epochs=0.0))
    assert re.search(r"\n- weights: [\d,]+, of a linear probe\n", write(config.run.dir))


def test_of_several_labels_each_has_its_row(config):
    config = changed(config, model__task="multi-label")
    train(config)
    text = write(config.run.dir)
    assert "Most often confused" not in text
    rows = {row[0]: row[1:] for row in cells(section(text, "On the validation images, if"))}
    found = load_file(Path(config.run.dir, "predictions.safetensors"))
    for number, name in enumerate(classes_of(config)):
        own, taken = found["target"][:, number] == 1, found["predicted"][:, number] == 1
        assert rows[name][1] == wilson(int((own & taken).sum()), int(own.sum()))
    right = int((found["target"] == found["predicted"]).all(1).sum())
    assert f"| all labels right | {wilson(right, len(found['target']))} |" in text


def test_test_images_that_could_not_be_read_are_none_of_the_share():
    parts = {"test": facts.Part(10, torch.tensor([5, 5]))}
    known = SimpleNamespace(parts=parts, test_metrics={"top1": 0.5, "bad_images": 2})
    assert facts.Facts.test_right.fget(known) == (4, 8)


def test_a_million_classes_are_counted_without_a_table_of_all_images_and_classes():
    truth = torch.arange(10**6)
    truth[0] = LEFT_OUT
    found = torch.zeros(10**6, dtype=torch.int64)
    known = facts.SavedPredictions(found, truth, "", {}, range(10**6), step=1)
    card = SimpleNamespace(predictions=known, is_multi_label=False)
    right, has, taken = facts.Facts.class_counts(card)
    assert (sum(right), sum(has)) == (0, 10**6 - 1)
    assert taken[:2] == [10**6 - 1, 0]


def test_labels_that_are_unknown_are_neither_right_nor_taken_for_others():
    truth = torch.tensor([[1, 0], [LEFT_OUT, 1], [0, 1]], dtype=torch.int8)
    found = torch.tensor([[1, 1], [1, 1], [1, 0]], dtype=torch.int8)
    known = facts.SavedPredictions(found, truth, "", {}, ("ant", "bee"), step=1)
    card = SimpleNamespace(predictions=known, is_multi_label=True)
    assert facts.Facts.class_counts(card) == [[1, 1], [1, 2], [2, 2]]


def test_training_images_that_were_prepared_are_counted_unless_they_are_others(monkeypatch):
    source = Source(torch.tensor([0, 1, 1]), ("ant", "bee"), torch.zeros(3, 2, 2, 3).byte())
    monkeypatch.setattr(facts, "open_part", lambda *_: source)
    for own, counts in (("", [1, 2]), (" jpeg 256", [1, 2]), ("0", None)):
        known = SimpleNamespace(fingerprint=source.fingerprint() + own)
        parts = facts.open_parts(known, has_test=False)
        assert (parts["training"].by_class.tolist() if parts else None) == counts


def test_a_card_has_the_metrics_of_the_weights_that_it_is_of(tmp_path):
    row = {"step": 2, "val/top1": 0.75}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "status.json").write_text('{"result": {"step": 4, "val/top1": 0.5}}')
    run = SimpleNamespace(metric="top1", predictions=SimpleNamespace(step=2))
    assert facts.best_metrics(tmp_path, run) == row


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("https://me:secret@host:8443/shards?signature=secret", "shards"),
        ("https://host/a?x=/y/z", "a"),
        ("https://me:secret@host", "host"),
        ("https://me:secret@host:8443/", "host"),
        ("/home/me/photos/", "photos"),
        ("photos/cats", "photos/cats"),
    ],
)
def test_no_address_tells_who_may_read_there(path, told):
    assert origin.public(path) == told


@pytest.mark.parametrize(
    ("knob", "tool"),
    [
        ("data.root", ""),
        ("run.init_from", ""),
        ("data.labels", "label-table"),
        ("optim.teacher", "distill"),
    ],
)
def test_the_command_names_no_folder_of_the_machine(knob, tool):
    if tool and knob not in of_tools():
        pytest.skip(f"the tool {tool} is not here")
    own = {knob.replace(".", "__"): "/home/me/mine.csv"}
    config = changed(changed(Config(), data__name="folder"), **own)
    assert "/home/me" not in origin.command_line(config)
    assert "mine.csv" in origin.command_line(config)
