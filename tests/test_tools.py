"""A project has the tools that were asked for, and others come and go by name."""

import json
import random
import re
import shutil
import sys
from itertools import pairwise

import pytest
from conftest import PROJECT, ROOT, SMOKE, contents, git_until, pyproject, run, template
from image_classifier.extensions import PLACES, find_tools, flag
from image_classifier.runtime.command_line import all_presets

from pretuned import cli, update
from pretuned_answers import RefusedError, tools

NAMES = [name.replace("_", "-") for name in tools.offered(PROJECT)]
SIZES = ("none", "few", "usual", "all")
pytestmark = pytest.mark.usefixtures("renders_once")


def change(project, *words):
    """Commit a project, and run `pretuned add` or `pretuned remove` on it."""
    committed(project)
    assert cli.main([*words, "--project", str(project)]) == 0


def committed(project):
    """A project, with all that is in it now in git."""
    if not (project / ".git").exists():
        run("git", "init", "--quiet", folder=project)
    run("git", "add", "--all", folder=project)
    words = "-c user.name=a -c user.email=a@b.c commit --quiet --allow-empty --message=all"
    run("git", *words.split(), folder=project)
    return project


def files_of(project):
    """The contents of a project, but for git's."""
    return {name: file for name, file in contents(project).items() if not name.startswith(".git/")}


def missing_from(project):
    """The tools that the template has and a project has not."""
    here = {path.name for path in project.glob("src/*/tools/*")}
    return {name for name in tools.offered(PROJECT) if name not in here}


def options_of(name):
    """The options that a tool adds, as flags."""
    module = find_tools("options").get(name.replace("_", "-"))
    sections = module.SECTIONS.items() if module else ()
    return {
        f"--{PLACES.get(section, section)}.{flag(knob)}".replace("--.", "--")
        for section, part in sections
        for knob in part.__dataclass_fields__
    }


def test_each_size_has_what_the_question_says():
    words = json.loads((ROOT / "cookiecutter.json").read_text())["__prompts__"]["tools"]
    for size in ("few", "usual"):
        said = words[size].partition(": ")[2].split(", ")
        assert said == sorted(name.replace("_", "-") for name in tools.chosen(PROJECT, size))
    found = [{*tools.chosen(PROJECT, size)} for size in SIZES]
    assert all(one < other for one, other in pairwise(found))
    assert all(tools.summary(tools.there(PROJECT)[name]).endswith(".") for name in found[-1])


@pytest.mark.parametrize("name", tools.offered(PROJECT))
def test_a_short_link_from_a_tool_leads_to_one_that_comes_with_it(name):
    page = (tools.there(PROJECT)[name] / "README.md").read_text(encoding="utf-8")
    # Longer ones, by way of `tools/`, go with the tool that they lead to.
    found = {*re.findall(r"\]\(\.\./(\w+)/", page)}
    assert found <= tools.with_needs(PROJECT, [name])


@pytest.mark.parametrize("name", tools.offered(PROJECT))
def test_a_command_on_the_page_of_a_tool_has_a_preset_that_comes_with_it(name):
    page = (tools.there(PROJECT)[name] / "README.md").read_text(encoding="utf-8")
    for preset in re.findall(r"(?m)^python train\.py ([a-z]\w*)", page):
        owner = re.findall(r"\.tools\.(\w+)", all_presets()[preset].__module__)
        assert {*owner} <= tools.with_needs(PROJECT, [name]), preset


@pytest.mark.parametrize("name", tools.offered(PROJECT))
def test_an_option_or_a_preset_of_another_tool_on_the_page_of_a_tool_stands_beside_its_name(name):
    pages = [tools.there(PROJECT)[name] / "README.md"]
    pages += [PROJECT / page for page in tools.PAGES.get(name, ())]
    owners = {word: tool for tool in tools.offered(PROJECT) for word in options_of(tool)}
    owners |= {
        preset: owner
        for preset, build in all_presets().items()
        for owner in re.findall(r"\.tools\.(\w+)", build.__module__)
    }
    for page in pages:
        text = page.read_text(encoding="utf-8")
        found = {*re.findall(r"--[a-z][\w.-]*\w|(?<=`)[a-z]\w+(?=`)", text)} & owners.keys()
        for word in found:
            tool = owners[word].replace("_", "[-_]")
            is_named = re.search(rf"\b{tool}\b", re.sub(r"--[\w.-]+", "", text))
            assert is_named or owners[word] in tools.with_needs(PROJECT, [name]), (page, word)


@pytest.mark.parametrize("size", SIZES)
def test_no_text_names_a_tool_that_is_not_there(size, render):
    project = render(tools=size)
    assert pyproject(project)["tool"]["pretuned"]["answers"]["tools"] == size
    gone = missing_from(project)
    verbs = {verb for name in gone for verb in tools.verbs(tools.there(PROJECT)[name])}
    options = {option for name in gone for option in options_of(name)}
    for path in [project / "pyproject.toml", *project.rglob("*.md")]:
        text = path.read_text(encoding="utf-8")
        where = str(path.relative_to(project))
        assert {*re.findall(r"tools[./]([a-z_]+)", text)} & gone == set(), where
        assert size != "none" or "`tools/`" not in text, where
        assert not re.search(r"(?m)^\|[-|: ]+\|\n(?!\|)", text), where  # a table without rows
        assert not re.search(r":\n{3,}|:\n+(#|\Z)", text), where  # a sentence without its list
        assert {*re.findall(r"(?:image-classifier |`)([a-z-]+)[ `]", text)} & verbs == set(), where
        assert {*re.findall(r"--[a-z][\w.-]*\w", text)} & options == set(), where


def test_the_core_knows_no_tool_by_its_name():
    package = PROJECT / "src" / "image_classifier"
    for path in package.rglob("*.py"):
        if package / "tools" in path.parents:
            continue
        text = path.read_text(encoding="utf-8").replace("pretuned add ", "")  # a hint in a message
        found = re.findall(r"tools[/.]([a-z_]+)", text)
        found += re.findall(r"_tool\(\s*\"\w+\",\s*\"([\w-]+)", text)
        assert {name.replace("-", "_") for name in found} & {*tools.there(PROJECT)} == set(), path


def test_a_tool_imports_from_those_alone_that_it_is_listed_to_need():
    """The import contract sees to it in their code, but not in their tests."""
    for name in tools.offered(PROJECT):
        folder = tools.there(PROJECT)[name]
        texts = [path.read_text(encoding="utf-8") for path in folder.rglob("*.py")]
        found = re.findall(r"(?m)^ *from (?:\w+\.tools|\.)\.([a-z_]+)", "\n".join(texts))
        assert {*found} <= tools.with_needs(PROJECT, [name]), name


def parts_of_tests(name):
    """Each test and fixture of a tool, with what the whole file is skipped without."""
    for path in tools.there(PROJECT)[name].glob("tests/*.py"):
        head, *parts = path.read_text(encoding="utf-8").split("\n\n\n")
        of_all = "\n".join(re.findall(r".*skip.*", head))
        yield from (f"{of_all}\n{part}" for part in parts)


def test_tests_of_a_tool_name_the_other_tools_whose_options_they_try():
    owners = {option: name for name in tools.offered(PROJECT) for option in options_of(name)}
    for name in tools.offered(PROJECT):
        for part in parts_of_tests(name):
            knobs = re.findall(r"\b([a-z]+__\w+)", part)
            tried = {f"--{knob.replace('__', '.').replace('_', '-')}" for knob in knobs}
            tried |= {*re.findall(r"--[a-z.-]+", part)}
            others = re.sub(r"--[a-z.-]+|\b[a-z]+__\w+", "", part)
            for option in tried & owners.keys():
                owner = owners[option]
                words = owner, owner.replace("_", "-"), option[2:].replace("-", "_"), "mixed"
                is_named = re.search(rf"\b({'|'.join(words)})\b", others)
                assert is_named or owner in tools.with_needs(PROJECT, [name]), (name, option, part)


def test_tests_of_a_tool_ask_for_the_other_tools_whose_commands_they_run():
    there = tools.there(PROJECT)
    owners = {verb: name for name in tools.offered(PROJECT) for verb in tools.verbs(there[name])}
    for name in tools.offered(PROJECT):
        for part in parts_of_tests(name):
            for verb in owners.keys() & {*re.findall(r'(?:main\(\[|refusal\()"([a-z-]+)"', part)}:
                owner = owners[verb]
                is_asked = f"tools.{owner}" in part or f'("command", "{verb}")' in part
                assert is_asked or owner in tools.with_needs(PROJECT, [name]), (name, verb, part)


def test_adding_every_tool_to_few_gives_all_and_removing_them_gives_few(render, tmp_path):
    project = shutil.copytree(render(tools="few"), tmp_path / "project")
    few = files_of(project)
    added = sorted(missing_from(project))
    random.Random(0).shuffle(added)
    for start in range(0, len(added), 7):
        change(project, "add", *added[start : start + 7])
    assert files_of(project) == template()
    change(project, "remove", *added)
    assert files_of(project) == few


def test_the_code_of_the_owner_stays_and_meets_what_a_tool_brings(render, capsys):
    project = render(tools="few")
    lines = (project / "README.md").read_text().splitlines(keepends=True)
    (project / "README.md").write_text("".join([*lines, "mine\n"]))
    (project / "train.py").write_text("# mine\n")
    shutil.rmtree(project / "docs")
    change(project, "add", "search")
    assert (project / "README.md").read_text().endswith("mine\n")
    assert "tools/search/" in (project / "README.md").read_text()
    assert (project / "train.py").read_text() == "# mine\n"
    assert not (project / "docs/guide.md").exists()
    assert "search" in pyproject(project)["project"]["optional-dependencies"]
    (tool,) = project.glob("src/*/tools/search")
    shutil.rmtree(tool)  # by hand: it comes back where it is asked for
    change(project, "add", "lora")
    assert not tool.exists()
    capsys.readouterr()
    change(project, "add", "search")
    assert (tool / "command.py").exists()
    assert f"\nhow to use it: {tool}/README.md\n" in capsys.readouterr().out


# In one process, which imports torch once: the exit code of each command is printed.
COMMANDS = """
import sys
from image_classifier.cli import main
for line in sys.argv[1:]:
    print("exit code", main(line.split()), flush=True)
"""


def test_a_run_is_used_after_a_tool_has_gone(render):
    project = render(tools="all")

    def codes(*lines):
        """The exit codes of commands, and all that they say."""
        variables = {"folder": project, "PYTHONPATH": project / "src"}
        done = run(sys.executable, "-c", COMMANDS, *lines, **variables)
        return [int(code) for code in re.findall(r"exit code (\d)", done.stdout)], done

    first = f"train {SMOKE} --run.trackers --run.dir runs/a"
    other = f"train {SMOKE} --run.trackers --run.dir runs/b"
    assert codes(first, f"{other} --augment.policy trivialaugment --profile")[0] == [0, 0]
    change(project, "remove", "lora", "distill", "profile", "fsdp", "policies", "imagenet")
    found, done = codes("evaluate runs/b", other, first, f"{first} --model.lora-rank 2")
    assert found == [0, 2, 0, 2]
    evaluated, _, again, _ = done.stdout.split("exit code")[:4]
    assert evaluated
    assert "is done already" in again or "from step 2 of 2" in again
    policy, lora = done.stderr.splitlines()
    said = "was trained with --augment.policy trivialaugment, of a tool that is not here"
    assert said in policy
    assert "there is no --model.lora-rank" in lora


def test_a_change_that_is_killed_is_finished_by_the_same_command(render, tmp_path, monkeypatch):
    made = committed(render(tools="few"))
    whole = shutil.copytree(made, tmp_path / "whole")
    change(whole, "add", "find-lr")
    for moment in range(3, 1000, 4):
        killed = shutil.copytree(made, tmp_path / "killed")
        with monkeypatch.context() as patch:
            patch.setattr(update.Repository, "git", git_until(moment))
            code = cli.main(["add", "find-lr", "--project", str(killed)])
        assert code in (0, 130)
        if files_of(killed) != files_of(whole):
            assert cli.main(["add", "find-lr", "--project", str(killed)]) == 0
        assert files_of(killed) == files_of(whole)
        shutil.rmtree(killed)
        if code == 0:  # it calls git less often
            break


def test_what_was_killed_is_finished_before_another_change(render, monkeypatch, capsys):
    project = committed(render(tools="few"))
    own = update.Repository.git

    def until_written(repository, *words, **more):
        said = own(repository, *words, **more)
        return next(iter(())) if "-u" in words else said

    with monkeypatch.context() as patch:
        patch.setattr(update.Repository, "git", until_written)
        with pytest.raises(StopIteration):
            cli.main(["add", "find-lr", "--project", str(project)])
    assert cli.main(["remove", "report", "--project", str(project)]) == 2
    assert "another command was killed, and is finished only now" in capsys.readouterr().err
    assert [*project.glob("src/*/tools/find_lr")]
    change(project, "remove", "report")
    assert not [*project.glob("src/*/tools/report")]


def test_what_cannot_be_added_or_removed_is_refused_in_a_line(render, capsys, tmp_path):
    project = committed(render(tools="all"))
    before = files_of(project)

    def said(*words, folder=project):
        assert cli.main([*words, "--project", str(folder)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "unknown tool 'serch'; did you mean search? (there are: " in said("add", "serch")
    assert "cifar needs muon: remove cifar too" in said("remove", "muon")
    assert "no project of this template" in said("add", "search", folder=tmp_path)
    path = project / "pyproject.toml"
    text = path.read_text()
    for tools_, reason in (('"few"', "another template made"), ('["lor"]', "did you mean lora?")):
        path.write_text(text.replace('tools = "all"', f"tools = {tools_}"))
        committed(project)
        assert reason in said("add", "search")
    assert "unknown tool ''" in said("add", "")
    shutil.rmtree(project / ".git")
    assert "is not committed in a git repository" in said("add", "lora")
    path.write_text(text)
    assert files_of(project) == before
    with pytest.raises(RefusedError):
        tools.chosen(PROJECT, "few", "../x")


def test_all_tools_are_listed_with_what_they_do(render, capsys):
    project = render(tools="few")
    (project / "src/image_classifier/tools/lora/__pycache__").mkdir(parents=True)  # it has gone
    assert cli.main(["add", "--project", str(project)]) == 0
    said = capsys.readouterr().out
    assert {line[2:].split()[0] for line in said.splitlines()[:-2]} == {*NAMES}
    assert {line[2:].split()[0] for line in said.splitlines() if line.startswith("* ")} == {
        *("evaluate", "layer-decay", "linear-probe", "predict", "profile", "report"),
        *("tensorboard", "is"),
    }
