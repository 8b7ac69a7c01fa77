"""What a page names is there: files, links, tests, commands, options, presets; pages are short.

`pytest -s tests/test_documents.py` prints how many words each page has.
"""

import contextlib
import io
import json
import re
from functools import cache

import pytest
import yaml
from conftest import PROJECT, ROOT, tracked_files
from image_classifier.cli import commands
from image_classifier.config import Config
from image_classifier.presets import PRESETS
from image_classifier.runtime.command_line import all_presets, parse

from pretuned_answers import tools

PACKAGE = PROJECT / "src" / "image_classifier"
GUIDE = PROJECT / "docs" / "guide.md"
PAGES = {  # docs/notes is not here: notes tell what was found on their date
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted(PROJECT.glob("*.md")),
        *sorted((PROJECT / "docs").glob("*.md")),
        *sorted(PACKAGE.glob("tools/*/README.md")),
    )
}
FORMS = [f".github/ISSUE_TEMPLATE/{name}.yml" for name in ("bug", "feature")]
OTHERS = [*FORMS, ".github/PULL_REQUEST_TEMPLATE.md", "benchmarks/README.md"]
COMING = "docs/coming_from.md"
TEXTS = PAGES | {name: (ROOT / name).read_text(encoding="utf-8") for name in OTHERS}
TEXTS[COMING] = re.sub(r"(?m)^\|[^|]*", "", PAGES[COMING])  # the left column is not about us
UNCOUNTED = "docs/measured.md", "docs/faults.md", "docs/articles.ko.md"  # generated, translated
MOST_WORDS = 25_000  # of all pages but these

FILE = r"`(?:\.\./)?([\w{}][\w{}./-]*?(?:/|\.(?:py|md|sh|ya?ml|toml|ipynb)))(?:::(\w[\w.]*))?`"
WRITTEN = r"`([\w./-]+\.(?:json|jsonl|safetensors|pt|html|npy|png|pickle|csv|txt|db|xml|bin))`"
SCRIPT = r"(?:python|torchrun [^`\n]*?)((?: -m)? (?:benchmarks|faults|docs/examples)\b[\w./]*)"
SCRIPT += r"([^`\n#|]*)"
TRAIN = r"(?:python|torchrun[^`\n]*?|--no-sync) train\.py([^`\n#|]*)"
FLAG = r"(?<![\w-])--[a-z][\w.-]*\w"
OF_USERS = "photos", "runs/", "images/", "mine.", "cat/", "predictions.csv"  # what a user has
MADE = {"ray/", "confirm/", "tensorboard/", "trackio/", "wandb/"}  # by tools, in a run's folder
SHORT = {"--pretrained"}  # of `--run.init-from pretrained`
OF_OTHERS = """
--backend-store-uri --durations --editable --fp16 --from --gpus-per-node --include-untracked
--logdir --master-addr --max-restarts --maxShapes --minShapes --nnodes --no-sync --node-rank
--nodes --onnx --optShapes --rdzv-backend --rm --saveEngine --tb
"""  # options of torchrun, Slurm, uv, git, docker, MLflow, TensorBoard, TensorRT and pytest


@cache
def files():
    """All files and folders of the repository, behind a slash; a folder has one at its end, too."""
    found = {f"/{path.as_posix()}" for path in tracked_files(ROOT)}
    return found | {file[: slash.end()] for file in found for slash in re.finditer("/", file)}


def resolved(name):
    """The files or folders of the repository whose paths end so."""
    return [file for file in files() if file.endswith(f"/{name}")]


@cache
def sources():
    """The code of the package and of `pretuned`, as one text."""
    paths = sorted([*PACKAGE.rglob("*.py"), *(ROOT / "src").rglob("*.py")])
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)


@cache
def anchors(path):
    """The anchors that the headings of a page have."""
    heads = re.findall(r"(?m)^#+ (.+)$", path.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@cache
def flags(verb):
    """The options that a command has, as its help lists them."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        commands()[verb](["--help"])
    return {*re.findall(FLAG, printed.getvalue())} | SHORT


@cache
def flags_of_scripts(folder):
    """The options that the scripts in a folder define."""
    text = "\n".join(path.read_text("utf-8") for path in sorted(folder.rglob("*.py")))
    derived = (
        {f"--{word}" for word in re.findall(r'"([a-z]\w*)"', text)} if 'f"--{' in text else set()
    )
    return {*re.findall(rf'"({FLAG})"', text)} | derived


@pytest.mark.parametrize("page", TEXTS)
def test_files_and_functions_that_a_page_names_are_there(page):
    for name, inner in re.findall(FILE, TEXTS[page]):
        if name in MADE or name.startswith(OF_USERS):
            continue
        found = resolved(name)
        assert found, name
        if inner:
            defined = rf"(?m)^ *(def |class )?{inner.rpartition('.')[2]}\b"
            assert any(re.search(defined, (ROOT / file[1:]).read_text("utf-8")) for file in found)
    for name in re.findall(WRITTEN, TEXTS[page]):
        known = name.startswith(OF_USERS) or "..." in name or re.search("[A-Z]", name)
        assert known or resolved(name) or name.rpartition("/")[2] in sources(), name


@pytest.mark.parametrize("page", TEXTS)
def test_links_of_a_page_lead_somewhere(page):
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", TEXTS[page]):
        name, _, anchor = link.replace("%7B", "{").replace("%7D", "}").partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), link
        assert not anchor or anchor in anchors(path), link


@pytest.mark.parametrize("page", TEXTS)
def test_commands_that_a_page_names_are_there_and_take_its_options(page):
    called = re.findall(r"image-classifier ([a-z][a-z-]*)([^`\n#|]*)", TEXTS[page])
    called += [("train", words) for words in re.findall(TRAIN, TEXTS[page])]
    for verb, words in called:
        assert verb in commands()
        assert {*re.findall(FLAG, words)} <= flags(verb), verb
        preset = re.match(r" +([a-z]\w+)", words)
        assert verb != "train" or not preset or preset[1] in all_presets()
    for target in re.findall(r"(?:`|^)make ([a-z]+)", TEXTS[page], re.MULTILINE):
        makefiles = [(folder / "Makefile").read_text("utf-8") for folder in (ROOT, PROJECT)]
        assert any(f"\n{target}:" in text for text in makefiles), target
    for verb in re.findall(r"(?:`|^)pretuned ([a-z]+)", TEXTS[page], re.MULTILINE):
        assert f'"{verb}"' in sources(), verb
    for script, words in re.findall(SCRIPT, TEXTS[page]):
        path = script.split()[-1]
        places = [folder for folder in (ROOT, PROJECT) if (folder / path).exists()]
        assert places, path
        place = places[0] / path
        known = flags_of_scripts(place if place.is_dir() else place.parent)
        known |= flags_of_scripts(ROOT / "faults")
        assert {*re.findall(FLAG, words)} <= known | flags("train"), path


@pytest.mark.parametrize("page", TEXTS)
def test_options_that_a_page_names_are_there(page):
    known = {flag for verb in commands() for flag in flags(verb)} | {*OF_OTHERS.split()}
    for folder in (ROOT / "benchmarks", ROOT / "faults", ROOT / "src", PROJECT / "docs"):
        known |= flags_of_scripts(folder)
    assert {*re.findall(FLAG, TEXTS[page])} - known == set()


@pytest.mark.parametrize("form", FORMS)
def test_github_can_show_the_form_of_an_issue(form):
    fields = yaml.safe_load(TEXTS[form])
    assert {"name", "description", "body"} <= fields.keys()
    asked = [field for field in fields["body"] if field["type"] != "markdown"]
    assert {field["type"] for field in asked} == {"textarea"}
    assert len({field["id"] for field in asked}) == len(asked)
    assert all(field["attributes"]["label"] for field in asked)
    assert any(field["validations"]["required"] for field in asked if "validations" in field)


def test_training_takes_every_option_that_stands_for_one_of_another_library():
    rows = re.findall(r"(?m)^\| `.*", TEXTS[COMING])
    options = re.findall(r"`(?:python train\.py )?(--[a-z][^`]+)`", "\n".join(rows))
    assert len(options) >= 40
    for words in options:
        parse(Config, words.split(), prog="train", about="", default=PRESETS["finetune"]())


def test_the_guide_lists_every_tool_and_links_to_its_page():
    rows = re.findall(r"(?m)^\| \[([a-z-]+)\]\((.+?)\) \| \S", GUIDE.read_text("utf-8"))
    names = {name.replace("-", "_"): link for name, link in rows}
    assert {*names} == {*tools.offered(PROJECT)}
    assert len(rows) == len(names)
    for name, link in names.items():
        assert (GUIDE.parent / link).resolve() == PACKAGE / "tools" / name / "README.md"


def test_the_page_of_questions_has_the_tools_of_each_size_and_every_question():
    page = PAGES["docs/make_a_project.md"]
    for size in ("few", "usual"):
        names = sorted(name.replace("_", "-") for name in tools.chosen(PROJECT, size))
        assert f"{size}: {', '.join(names)};" in page
    questions = json.loads((ROOT / "cookiecutter.json").read_text(encoding="utf-8"))
    assert {name for name in questions if name[0] != "_" and f"`{name}`" not in page} == set()


def words_of(text):
    """How many words a reader meets: no comments, rules of tables or numbers alone."""
    visible = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    return len(re.findall(r"\S*[^\W\d_]\S*", visible))


def test_pages_are_short():
    counts = {page: words_of(text) for page, text in PAGES.items()}
    for page, count in sorted(counts.items(), key=lambda row: -row[1]):
        print(f"{count:6,} {page}")
    of_tools = [count for page, count in counts.items() if "/tools/" in page]
    total = sum(counts.values()) - sum(counts[page] for page in UNCOUNTED)
    print(f"{sum(of_tools):6,} in the {len(of_tools)} pages of tools")
    print(f"{total:6,} in all but {', '.join(UNCOUNTED)}: at most {MOST_WORDS:,}")
    assert total <= MOST_WORDS
    assert len(PAGES["docs/design.md"].split()) <= 2500


def test_notes_say_first_that_nobody_keeps_them_up():
    notes = sorted((ROOT / "docs" / "notes").glob("*.md"))
    assert notes
    for note in notes:
        first = note.read_text(encoding="utf-8").partition("\n")[0]
        assert re.fullmatch(
            r"What was found by \d{4}-\d\d-\d\d\. This note is not kept up.*", first
        )
        assert note.name.startswith(re.search(r"\d{4}-\d\d", first)[0])
