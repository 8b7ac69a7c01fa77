"""Figures come from results, results name the code they are of, configs spell out all knobs."""

import ast
import json
import re
from argparse import Namespace

import figures
import loaders
import measure
import measurements
import memory
import overhead
import precision
import project
import pytest
import resident
import training
from conftest import ROOT
from image_classifier.runtime.config_dict import flatten

SCRIPTS = [*sorted((ROOT / "benchmarks").glob("*.py")), ROOT / "faults" / "__main__.py"]
TRICKS = "augment.mixup augment.cutmix augment.cutout augment.min_size optim.warmup_epochs"
TRICKS += " optim.ema_decay optim.label_smoothing optim.freeze_bn optim.clip_norm"
OFF = dict.fromkeys(TRICKS.split(), 0) | {
    **{"augment.policy": "none", "augment.tta": "none", "data.balance": "none"},
    **{"optim.name": "sgd", "optim.schedule": "constant", "run.init_from": ""},
    **{"optim.layer_decay": 1, "optim.accumulate": 1},
}


def test_the_pages_have_the_figures_of_the_results():
    # After a change of what a result is about, its rows have to say so: `make figures`.
    assert [path.name for path, _ in figures.differing()] == []


def test_no_figure_of_the_readme_is_written_by_hand():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = re.search(r"^## Measured, not promised\n(.*?)^## ", readme, re.MULTILINE | re.DOTALL)[
        1
    ]
    by_hand = re.sub(r"<!-- figures: .*?<!-- /figures -->", "", section, flags=re.DOTALL)
    assert len(by_hand) < len(section)
    assert not re.findall(r".*\d.*", by_hand)


def test_a_result_of_other_code_says_so_in_its_row(monkeypatch):
    result = measurements.load("training") | {
        "digest": measurements.digest(ROOT / "benchmarks/training.py")
    }
    assert measurements.staleness(result) == ""
    assert "**" not in figures.Machines().cell(result)
    monkeypatch.setattr(measurements, "digest", lambda _: "another")
    assert "**measured before later changes**" in figures.Machines().cell(result)


def test_a_figure_names_its_version_or_between_two_its_commit():
    assert measurements.state({"version": "0.2.0", "commit": "1234567"}) == "version 0.2.0"
    assert measurements.state({"version": "0.3.0.dev0", "commit": "123"}) == "commit 123"
    assert measurements.state({"commit": "123"}) == "commit 123"


def test_every_result_that_needs_no_gpu_is_measured_again_by_make_measure():
    commands = (*measure.QUICK, *measure.LONG, *measure.AMX)
    again = {name: words.split()[0] for name, words in commands}
    names = {path.stem for path in measurements.RESULTS.glob("*.json")}
    of_others = {name for name in names if re.search("gpu|cuda", name)}  # machines
    assert names - again.keys() - of_others == {"faults"}  # make faults
    for name, script in again.items():
        result = measurements.load(name)
        assert result["script"] == f"benchmarks/{script}.py"


@pytest.mark.parametrize("measured", [{}, {"ours": {}}])
def test_a_command_of_which_all_failed_gives_no_result_and_runs_again(
    tmp_path, monkeypatch, measured
):
    script = tmp_path / "benchmarks" / "some.py"
    script.parent.mkdir()
    result = json.dumps({"measured": measured, "runs": 1})
    script.write_text(f"from pathlib import Path; Path('some.json').write_text({result!r})\n")
    there = tmp_path / "some.json"
    there.write_text(json.dumps({"measured": measured, "runs": 0}))
    monkeypatch.setattr(measure, "ROOT", tmp_path)
    monkeypatch.setattr(measure, "MEASURED", tmp_path)
    monkeypatch.setattr(measure, "OF_THIS_ENVIRONMENT", ("some",))
    monkeypatch.setattr(measurements, "staleness", lambda _: "")
    assert measure.measure("some", "some") is bool(measured)
    assert json.loads(there.read_text())["runs"] == (not measured)


@pytest.mark.parametrize(
    ("before", "after", "is_same"),
    [
        ('def f(x):\n "Says."\n return x + 1  # why', "def f(x):\n\n return (x + 1)", True),
        ("raise ValueError(f'bad {x}')", "raise ValueError('not good')", True),
        ("def main():\n    a()\nb()", "def main():\n    c()\nb()", True),
        ("x = 1", "x = 2", False),
        ("f(x)", "f(x, y=1)", False),
        ("if x: raise E", "if y: raise E", False),
    ],
)
def test_words_make_no_result_stale_but_code_does(before, after, is_same):
    one, other = ("".join(measurements.code(ast.parse(text), {"main"})) for text in (before, after))
    assert (one == other) is is_same


def test_a_digest_is_the_same_in_every_version_of_python():
    text = "def f(x: int = 1, *a) -> str:\n    return f'{x!r:>{w}} {a}' 'b' if x else None\nf(1.5)"
    code = "".join(measurements.code(ast.parse(text), set()))
    assert measurements.hashlib.sha256(code.encode()).hexdigest()[:12] == "9da1f35edae2"


def test_a_digest_counts_what_is_imported_and_what_is_named(tmp_path):
    counted = {path.name for path in measurements.modules_of(ROOT / "benchmarks/training.py")}
    assert {"training.py", "loaders.py", "project.py", "rounds.py", "pictures.py"} <= counted
    assert "measurements.py" not in counted  # what writes a result does not change it
    assert len(set(map(measurements.digest, SCRIPTS))) == len(SCRIPTS)  # all that is named is there
    script = tmp_path / "script.py"
    script.write_text('ABOUT = "train nowhere"')
    with pytest.raises(FileNotFoundError, match=r"ABOUT of .*script.py names nowhere"):
        measurements.digest(script)


def test_all_that_a_script_names_counts(tmp_path):
    script = tmp_path / "script.py"
    script.write_text('ABOUT = "train "\nABOUT += "optim"\nNAMES = "data"\nNAMES += "models"')
    assert measurements.about(script) == "train optim"
    assert measurements.about(ROOT / "benchmarks/input_formats.py").endswith(" tools/prepare")


def test_a_comparison_has_no_tricks_but_those_that_it_names(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "images_of", lambda _: 64)
    course = training.Course(tmp_path, tmp_path, steps=20, seed=0, min_area=0.08, device="cpu")
    for config in (
        loaders.build_config(loaders.Task(tmp_path, tmp_path)),
        *(training.build_config(course, kind) for kind in ("raw", "none", "jpeg", "synthetic")),
        precision.build_config(next(iter(precision.TASKS.values())), "auto", "cpu", tmp_path),
        overhead.build_config(Namespace(blocks=1, batch=8, width=8), tmp_path),
        resident.build_config(),
        memory.build_config(tmp_path),
    ):
        assert flatten(config).items() >= OFF.items()


def test_a_knob_that_no_comparison_names_is_an_error(monkeypatch):
    monkeypatch.delitem(project.SECTIONS["optim"], "lr")
    with pytest.raises(TypeError, match=r"name lr of OptimConfig in .*project.py"):
        project.build_config()


def test_no_comparison_begins_with_a_preset():
    for path in SCRIPTS[:-1]:
        assert not re.search(r"import presets|\.presets\b", path.read_text(encoding="utf-8")), path
