"""What a project is built from is bounded or pinned, and what builds it may do no more."""

import re

import pytest
import yaml
from conftest import PROJECT, ROOT, pyproject

BOTH = pytest.mark.parametrize("folder", [ROOT, PROJECT], ids=["template", "project"])


@BOTH
def test_dependencies_have_lower_bounds_and_no_upper_ones(folder):
    project = pyproject(folder)
    needs = project["project"]["dependencies"] + project["dependency-groups"]["dev"]
    assert needs
    pattern = r"[a-z0-9-]+(\[.+\])?>=[0-9]+(\.[0-9]+)*"
    assert not [need for need in needs if not re.fullmatch(pattern, need)]


def test_torch_is_none_whose_safe_loading_can_be_passed_by():
    needs = dict(need.split(">=") for need in pyproject(PROJECT)["project"]["dependencies"])
    assert tuple(map(int, needs["torch"].split("."))) >= (2, 6)  # CVE-2025-32434


@BOTH
def test_actions_are_pinned_to_commits_and_may_only_read(folder):
    text = (folder / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {}
    # A pull request from outside must not run with the secrets of the repository.
    assert set(workflow[True]) == {"push", "pull_request", "schedule"}  # `on` is true in YAML 1.1
    for job in workflow["jobs"].values():
        # Nor may it run on a machine of theirs.
        assert "vars." not in job["runs-on"] or "!= 'pull_request'" in job["if"]
        assert job["permissions"] == {"contents": "read"}
        assert job["timeout-minutes"]
        for step in job["steps"]:
            assert "${{" not in step.get("run", "")  # it would be shell, whatever it holds
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False
    pinned = re.findall(r"uses: [\w-]+/[\w-]+@[0-9a-f]{40} # v[0-9]+\.[0-9]+\.[0-9]+\n", text)
    assert len(pinned) == text.count("uses: ") == 2 * len(workflow["jobs"])


def test_images_of_gitlab_and_docker_have_a_version():
    gitlab = (ROOT / "parts/ci/GitLab CI/.gitlab-ci.yml").read_text(encoding="utf-8")
    job = yaml.safe_load(gitlab)["test"]
    assert job["image"] == "python:$VERSION"
    for version in job["parallel"]["matrix"][0]["VERSION"]:
        assert re.fullmatch(r"3\.[0-9]+", version)
    dockerfile = (PROJECT / "Dockerfile").read_text(encoding="utf-8")
    assert re.search(r"^FROM python:3\.[0-9]+-slim$", dockerfile, re.MULTILINE)
    assert re.search(r"^USER (?!root)\w+$", dockerfile, re.MULTILINE)
    assert not re.search(r"^ADD |curl|wget", dockerfile, re.MULTILINE)


def test_nothing_listens_beyond_the_machine():
    for path in [*PROJECT.rglob("*.py"), *PROJECT.glob("*.md"), *PROJECT.glob("[MDs]*")]:
        if path.is_file() and "tests" not in path.parts:
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"--bind_all|--host\b|0\.0\.0\.0", text), path
