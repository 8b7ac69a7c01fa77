"""The pages of the articles name what is there: files, functions, tests, options, rows, figures."""

import ast
import re
from functools import cache

import figures
import pytest
from conftest import PROJECT, ROOT
from image_classifier.runtime.command_line import flags_of
from image_classifier.tools.bench.command import BenchOptions
from image_classifier.tools.bench.tips import TIPS
from image_classifier.tools.search.command import SearchOptions

PACKAGE = PROJECT / "src" / "image_classifier"
PAGES = {name: (ROOT / "docs" / name).read_text(encoding="utf-8") for name in figures.ARTICLES}
VERDICTS = {"맞음": "Right", "절반만 맞음": "Half right", "틀림": "Wrong"}
FIELDS = {"코드": "Code", "테스트": "Test", "옵션": "Option", "측정": "Measured", "Tests": "Test"}
OPEN = ("not shown", "nothing to measure", "not there", "측정하지 않았", "대상이 없", "아직 없")
ROW = r"(?m)^### (\d+)\. .*\n\n\*\*(.+)\*\* · (.+)\n\n(?:[^-#\n].*\n)+\n((?:- .*\n(?:  .*\n)*)+)"


def spans(text):
    """What is set as code."""
    return re.findall(r"`([^`]+)`", text)


def rows(page):
    """Of each row: number, verdict, articles, and by field what is set as code and the text."""
    found = re.findall(ROW, PAGES[page])
    names = re.findall(r"^\| ([^|]+) \|", PAGES[page].partition("\n## ")[0], re.M)[2:]
    for number, verdict, articles, fields in found:
        parts = re.findall(r"^- (.+?):((?:.|\n  )*)", fields, re.M)
        about = {FIELDS.get(name, name): text for name, text in parts}
        kind = VERDICTS.get(verdict, verdict)
        yield int(number), kind, [names.index(one) for one in articles.split(", ")], about


def flags(page):
    """The rows of the table of flags, without remarks."""
    table = PAGES[page].rpartition("\n## ")[2]
    return [spans("|".join(line.split("|")[:4])) for line in re.findall(r"^\| `.*", table, re.M)]


@cache
def names_in(path):
    """The functions, classes, methods and constants of a file."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        for inner in getattr(node, "body", ()) if isinstance(node, ast.ClassDef) else ():
            found.add(f"{node.name}.{getattr(inner, 'name', '')}")
    return found


def test_both_pages_have_the_same_rows_with_the_same_code():
    here, there = (
        [(*row, {k: spans(v) for k, v in about.items()}) for *row, about in rows(page)]
        for page in PAGES
    )
    assert [row[0] for row in here] == [*range(1, 60)]
    assert all([*row[-1]][:4] == ["Code", "Test", "Option", "Measured"] for row in here)
    assert all(row[1] in VERDICTS.values() for row in here)
    assert here == there
    assert flags("articles.md") == flags("articles.ko.md")
    assert len(flags("articles.md")) >= 30


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_is_there(page):
    kinds = (BenchOptions, SearchOptions)  # which have those of training, too
    known = {f"--{flag}" for kind in kinds for flag in flags_of(kind)}
    for name in spans(PAGES[page]):
        path, _, inner = name.partition("::")
        if re.fullmatch(r"(\.\./)?[\w/]+\.(py|md|sh)", path):
            places = [folder / path for folder in (PACKAGE, PROJECT) if (folder / path).is_file()]
            assert places, name
            assert not inner or inner in names_in(places[0]), name
        elif not name.startswith("sbatch"):
            assert {*re.findall(r"--\S+", name)} <= known, name
    for number, *_, about in rows(page):
        assert all("/test_" in name for name in spans(about["Test"])), number
        assert {*spans(about.get("bench", ""))} <= {*TIPS}, number


@pytest.mark.parametrize("page", PAGES)
def test_no_figure_is_written_by_hand(page):
    for number, *_, about in rows(page):
        text = re.sub(r"`[^`]*`", "", about["Measured"])
        by_hand = figures.FIGURE.sub("", text)
        assert by_hand != text or any(words in by_hand for words in OPEN), number
        no_result = re.sub(r"[A-Za-z]+-?\d+|\d+ ?(pixels|픽셀)", "", by_hand)  # ResNet-18, bf16
        assert not re.search(r"\d", no_result), number
