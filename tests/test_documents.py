"""What a page names is there: files, links, tests, commands, options, presets; pages are short."""

import contextlib
import io
import re
from functools import cache

import pytest
from conftest import PROJECT, ROOT, tracked_files
from image_classifier.cli import commands
from image_classifier.runtime.command_line import all_presets

from pretuned_answers import tools

PACKAGE = PROJECT / "src" / "image_classifier"
GUIDE = PROJECT / "docs" / "guide.md"
PAGES = {  # docs/notes is not here: notes tell what was found on their date
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted(PROJECT.glob("*.md")),
        *sorted((PROJECT / "docs").glob("*.md")),
        *sorted(PACKAGE.glob("tools/*/README.md")),
    )
}
TEXTS = PAGES | {"benchmarks/README.md": (ROOT / "benchmarks/README.md").read_text("utf-8")}
MOST_WORDS = 40_000  # of all pages; the aim is 25,000

FILE = r"`(?:\.\./)?([\w{}][\w{}./-]*?(?:/|\.(?:py|md|sh|ya?ml|toml|ipynb)))(?:::(\w[\w.]*))?`"
SCRIPT = r"python (benchmarks/\w+\.py|-m faults)([^`\n#|]*)"
TRAIN = r"(?:python|torchrun[^`\n]*?|--no-sync) train\.py([^`\n#|]*)"
FLAG = r"(?<![\w-])--[a-z][\w.-]*\w"
OF_USERS = ("photos", "runs/", "images/", "mine.", "cat/", "tensorboard/")  # files of a user
MADE = {"ray/", "confirm/", "trackio/", "wandb/"}  # folders that a tool makes in a run's folder
SHORT = {"--pretrained"}  # of `--run.init-from pretrained`
OF_OTHERS = """
--allow-unauthenticated --backend-store-uri --data-binary --editable --fp16 --gpus-per-node
--include-untracked --local-ranks-filter --logdir --master-addr --maxShapes --minShapes --network
--nnodes --no-sync --node-rank --nodes --nproc-per-node --onnx --optShapes --rdzv-backend --rm
--saveEngine --seed --from --max-restarts --durations --ignore --tb
"""  # options of torchrun, Slurm, uv, git, docker, TensorRT, pytest and the like


def places(page):
    """Where a page may look for what it links to or names."""
    return [(ROOT / page).parent, ROOT, PROJECT, PACKAGE, PACKAGE / "tools"]


@cache
def files():
    """The paths of all files and folders of the repository, each behind a slash."""
    found = {f"/{path.as_posix()}" for path in tracked_files(ROOT)}
    return found | {f"{parent}/" for path in found for parent in re.findall(r".*(?=/)", path)}


@cache
def folders():
    """Every folder of the repository, between slashes."""
    return {file[: found.end()] for file in files() for found in re.finditer("/", file)}


def resolved(name):
    """The files whose paths end like `name`, which is that of a file or of a folder."""
    return [file for file in files() | folders() if file.endswith(f"/{name}")]


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
    """The options that the scripts in a folder of the repository define."""
    text = "\n".join(path.read_text("utf-8") for path in sorted((ROOT / folder).rglob("*.py")))
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
            word = rf"\b{inner.rpartition('.')[2]}\b"
            assert any(re.search(word, (ROOT / file[1:]).read_text("utf-8")) for file in found)


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
    for script, words in re.findall(SCRIPT, TEXTS[page]):
        folder = script.removeprefix("-m ").partition("/")[0]
        assert (ROOT / script.removeprefix("-m ")).exists(), script
        assert {*re.findall(FLAG, words)} <= flags_of_scripts(folder) | flags("train"), script


@pytest.mark.parametrize("page", TEXTS)
def test_options_that_a_page_names_are_there(page):
    known = {flag for verb in commands() for flag in flags(verb)} | {*OF_OTHERS.split()}
    for folder in ("benchmarks", "faults", "src", PROJECT / "docs"):
        known |= flags_of_scripts(folder)
    assert {*re.findall(FLAG, TEXTS[page])} - known == set()


def test_the_guide_lists_every_tool_and_links_to_its_page():
    rows = re.findall(r"(?m)^\| \[([a-z-]+)\]\((.+?)\) \| \S", GUIDE.read_text("utf-8"))
    names = {name.replace("-", "_"): link for name, link in rows}
    assert {*names} == {*tools.offered(PROJECT)}
    assert len(rows) == len(names)
    for name, link in names.items():
        assert (GUIDE.parent / link).resolve() == PACKAGE / "tools" / name / "README.md"


def words_of(text):
    """How many words a reader meets: no comments, rules of tables or numbers alone."""
    visible = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    return len(re.findall(r"\S*[^\W\d_]\S*", visible))


def test_all_pages_together_are_short():
    counts = {page: words_of(text) for page, text in PAGES.items()}
    for page, count in sorted(counts.items(), key=lambda row: -row[1]):
        print(f"{count:6,} {page}")
    total = sum(counts.values())
    print(f"{total:6,} in all, {total - counts['docs/articles.ko.md']:,} without the Korean page")
    assert total <= MOST_WORDS
    assert counts["docs/design.md"] <= 2500
