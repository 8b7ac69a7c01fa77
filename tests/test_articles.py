"""The pages of the articles say the same in both languages, and what they say is so."""

import ast
import re
from functools import cache

import figures
import pytest
import torch
from conftest import PROJECT, ROOT
from image_classifier.cli import commands
from image_classifier.config import Config
from image_classifier.presets import PRESETS
from image_classifier.runtime.command_line import flags_of, parse
from image_classifier.tools.bench.command import BenchOptions
from image_classifier.tools.bench.tips import find_tips
from image_classifier.tools.search.command import SearchOptions
from torch import nn
from torch.nn.functional import dropout
from torch.utils.data import DataLoader, SequentialSampler

PACKAGE = PROJECT / "src" / "image_classifier"
PAGES = {name: (ROOT / "docs" / name).read_text(encoding="utf-8") for name in figures.ARTICLES}
VERDICTS = {"맞음": "Right", "절반만 맞음": "Half right", "틀림": "Wrong"}
FIELDS = {"코드": "Code", "테스트": "Test", "옵션": "Option", "측정": "Measured", "Tests": "Test"}
OPEN = ("not shown", "not there", "측정하지 않았", "아직 없")
ROW = r"(?m)^### (\d+)\. (.*)\n\n\*\*(.+)\*\* · (.+)\n\n((?:[^-#\n].*\n)+)\n"
ROW += r"((?:- .*\n(?:  .*\n)*)+)"
OPTIONS = {"train": Config, "bench": BenchOptions, "search": SearchOptions}
ONE_WORD = {"레이어": "층", "그래디언트": "기울기", "DataLoader": "데이터로더", "95%": " %"}


def spans(text):
    """What is set as code."""
    return re.findall(r"`([^`]+)`", text)


def rows(page):
    """Of each row: number, verdict, articles, and by name its title, its text and its fields."""
    names = re.findall(r"^\| ([^|]+) \|", PAGES[page].partition("\n## ")[0], re.M)[2:]
    for number, title, verdict, articles, text, fields in re.findall(ROW, PAGES[page]):
        parts = re.findall(r"^- (.+?):((?:.|\n  )*)", fields, re.M)
        about = {"Title": title, "Text": text}
        about |= {FIELDS.get(name, name): part for name, part in parts}
        kind = VERDICTS.get(verdict, verdict)
        yield int(number), kind, [names.index(one) for one in articles.split(", ")], about


def facts(text):
    """What is the same in any language: code, numbers, names of errors and GPUs."""
    plain = re.sub(r"`[^`]*`|<!--.*?-->", "", text)
    found = re.findall(r"[A-Z]?\d+(?:\.\d+)*|[A-Z][a-z]\w+Error", plain, re.ASCII)
    return {*spans(text)}, {*found}


def flags(page):
    """The rows of the table of flags: what is set as code in each cell."""
    table = PAGES[page].rpartition("\n## ")[2]
    lines = re.findall(r"^\| `.*", table, re.M)
    return [[spans(cell) for cell in line.split("|")] for line in lines]


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


def test_both_pages_have_the_same_rows_verdicts_code_and_numbers():
    here, there = (
        [(*row, {name: facts(text) for name, text in about.items()}) for *row, about in rows(page)]
        for page in PAGES
    )
    assert [row[0] for row in here] == [*range(1, 60)]
    fields = ["Title", "Text", "Code", "Test", "Option", "Measured", "bench"]
    for row in here:
        assert {*fields[:4]} <= {*row[-1]}
        assert [*row[-1]] == [name for name in fields if name in row[-1]]
    assert all(row[1] in VERDICTS.values() for row in here)
    for one, other in zip(here, there, strict=True):
        assert one == other
    before = [{*spans(page.partition("\n## ")[0])} for page in PAGES.values()]
    assert before[0] == before[1]
    assert flags("articles.md") == flags("articles.ko.md")
    assert len(flags("articles.md")) >= 30


def test_no_verdict_is_right_where_the_text_says_that_an_article_errs():
    errs = r"\barticles?\s+(says?|has|calls?|proposes?|blames?|expects?|names)\b|for the article\b"
    found = [kind for _, kind, _, about in rows("articles.md") if re.search(errs, about["Text"])]
    assert len(found) >= 10
    assert "Right" not in found


def test_the_korean_page_has_one_word_for_one_thing():
    text = re.sub(r"`[^`]*`", "", PAGES["articles.ko.md"])
    assert {word for word in ONE_WORD if word in text} == {*ONE_WORD}
    assert {other for other in ONE_WORD.values() if other in text} == set()


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_is_there(page):
    for name in spans(PAGES[page]):
        path, _, inner = name.partition("::")
        if re.fullmatch(r"(\.\./)?[\w/]+\.(py|md|sh)", path):
            places = [folder / path for folder in (PACKAGE, PROJECT) if (folder / path).is_file()]
            assert places, name
            assert not inner or inner in names_in(places[0]), name
    for number, *_, about in rows(page):
        assert all("/test_" in name for name in spans(about["Test"])), number
        assert {*spans(about.get("bench", ""))} <= {*find_tips()}, number


def understood(line):
    """Whether the program takes a command, or options of training or of a tool."""
    words = re.sub(r"^(python |image-classifier )|\.py", "", line).split()
    verb = "" if words[0].startswith("--") else words.pop(0)
    if verb and not words:
        return verb in commands()
    preset = PRESETS[words.pop(0)]() if words[0] in PRESETS else Config()
    named = {word.removeprefix("--") for word in words if word.startswith("--")}
    for kind in [OPTIONS[verb]] if verb else OPTIONS.values():
        if named <= {*flags_of(kind)}:
            if words and not words[-1].startswith("--"):  # else the value is left out
                parse(kind, words, prog=verb, about="", default=kind(**vars(preset)))
            return True
    return False


@pytest.mark.parametrize("page", PAGES)
def test_the_program_takes_every_command_of_a_page(page):
    command = r"(python train\.py|image-classifier|(bench|search) --).*|--.*"
    found = [name for name in spans(PAGES[page]) if re.fullmatch(command, name)]
    assert {"python train.py smoke", "--run.max-minutes", "search --search"} <= {*found}
    assert [name for name in found if not understood(name)] == []


@pytest.mark.parametrize("page", PAGES)
def test_no_figure_is_written_by_hand(page):
    for number, *_, about in rows(page):
        text = re.sub(r"`[^`]*`", "", about.get("Measured", "not shown"))
        by_hand = figures.FIGURE.sub("", text)
        assert by_hand != text or any(words in by_hand for words in OPEN), number
        no_result = re.sub(r"[A-Za-z]+-?\d+|\d+ ?(pixels|픽셀)", "", by_hand)  # ResNet-18, bf16
        assert not re.search(r"\d", no_result), number


@pytest.mark.parametrize(
    ("row", "code", "error"),
    [
        (15, "tensor.rand", AttributeError),
        (38, "torch.cuda.empty_Cache()", AttributeError),
        (39, "torch.tensor([1], requires_grad=True)", RuntimeError),
    ],
)
def test_what_an_article_prints_fails_as_the_pages_say(row, code, error):
    for page in PAGES:
        texts = {number: about["Text"] for number, *_, about in rows(page)}
        assert code in spans(texts[row])
        assert error.__name__ in texts[row]
    with pytest.raises(error):
        eval(code, {"torch": torch, "tensor": torch.tensor})


def test_a_write_through_data_hides_from_backward_and_one_through_detach_does_not():  # row 14
    weight = torch.ones(2, requires_grad=True)
    hidden, seen = weight.exp(), weight.exp()
    hidden.data.zero_()
    hidden.sum().backward()
    assert weight.grad.tolist() == [0, 0]  # should be e
    seen.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        seen.sum().backward()
    with pytest.raises(RuntimeError, match="detach"):
        weight.numpy()


def test_a_loader_takes_no_sampler_beside_shuffle():  # row 22
    with pytest.raises(ValueError, match="sampler"):
        DataLoader([0, 1], shuffle=True, sampler=SequentialSampler([0, 1]))


def test_one_seed_of_torch_is_for_all_gpus(monkeypatch):  # row 36
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
    assert seeded == [3]


def test_no_grad_keeps_nothing_and_cuts_off_what_is_below():  # row 39
    lower, upper, norm = nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2)
    images = torch.ones(3, 2)
    assert lower.eval()(images).grad_fn is not None
    with torch.no_grad():
        assert lower(images).grad_fn is None
        norm(images)
    assert norm.running_mean.tolist() != [0, 0]
    upper(lower(images).detach()).sum().backward()
    assert upper.weight.grad is not None
    assert lower.weight.grad is None


def test_the_function_of_dropout_drops_in_evaluation_too():  # row 41
    assert (dropout(torch.ones(1000), 0.5) == 0).any()
