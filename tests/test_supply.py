"""What a project is built from is bounded or pinned, and what builds it may do no more."""

import re
import tomllib

import pytest
import yaml
from conftest import PROJECT, ROOT

WORKFLOWS = [folder / ".github/workflows/ci.yml" for folder in (ROOT, PROJECT)]
GITLAB = ROOT / "parts/ci/GitLab CI/.gitlab-ci.yml"


@pytest.mark.parametrize("folder", [ROOT, PROJECT], ids=["template", "project"])
def test_dependencies_have_lower_bounds_and_no_upper_ones(folder):
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    needs = project["project"]["dependencies"] + project["dependency-groups"]["dev"]
    assert needs
    for need in needs:
        assert re.fullmatch(r"[a-z0-9-]+>=[0-9]+(\.[0-9]+)*", need), need


def test_torch_is_none_whose_safe_loading_can_be_passed_by():
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))
    needs = dict(need.split(">=") for need in project["project"]["dependencies"])
    oldest = tuple(map(int, needs["torch"].split(".")))
    assert oldest >= (2, 6)  # CVE-2025-32434


@pytest.mark.parametrize("path", WORKFLOWS, ids=["template", "project"])
def test_actions_are_pinned_to_commits_and_may_only_read(path):
    text = path.read_text(encoding="utf-8")
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {}
    # A pull request from outside must not run with the secrets of the repository.
    assert set(workflow[True]) == {"push", "pull_request"}  # `on` is true in YAML 1.1
    for job in workflow["jobs"].values():
        assert job["permissions"] == {"contents": "read"}
        assert job["timeout-minutes"]
        for step in job["steps"]:
            assert "${{" not in step.get("run", "")  # it would be shell, whatever it holds
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False
    uses = re.findall(r"uses: (.*)", text)
    assert len(uses) == 2
    for use in uses:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v[0-9]+\.[0-9]+\.[0-9]+", use), use


def test_images_of_gitlab_and_docker_have_a_version():
    jobs = yaml.safe_load(GITLAB.read_text(encoding="utf-8"))
    versions = jobs["test"]["parallel"]["matrix"][0]["VERSION"]
    assert jobs["test"]["image"] == "python:$VERSION"
    assert all(re.fullmatch(r"3\.[0-9]+", version) for version in versions)
    dockerfile = (PROJECT / "Dockerfile").read_text(encoding="utf-8")
    assert re.search(r"^FROM python:3\.[0-9]+-slim$", dockerfile, re.MULTILINE)
    assert re.search(r"^USER (?!root)\w+$", dockerfile, re.MULTILINE)
    assert not re.search(r"^ADD |curl|wget", dockerfile, re.MULTILINE)


def test_nothing_listens_beyond_the_machine():
    for path in [*PROJECT.rglob("*.py"), *PROJECT.glob("*.md"), *PROJECT.glob("[MDs]*")]:
        if path.is_file() and "tests" not in path.parts:
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"--bind_all|--host\b|0\.0\.0\.0", text), path
