"""Any tool can be deleted: what is left lints, keeps its layers, and finds all of its tests."""

import shutil

from conftest import LONG_NAMES, PROJECT, python

SHARED = {"html"}  # by tools
TOOLS = {path.name for path in PROJECT.glob("src/*/tools/*/")} - SHARED - {"__pycache__"}

# One process imports what all of the tests do; the folders are looked at in its children.
CHECK = """
import multiprocessing, os, subprocess, sys
import numpy.ma, PIL.PngImagePlugin, tensorboard.summary, torch._dynamo, torchvision.transforms.v2
import importlinter.cli, pytest

ruff = f"{sys.prefix}/bin/ruff"

def check(folder):
    os.chdir(folder)
    os.environ["PYTHONPATH"] = f"{folder}/src"
    sys.path[:0] = [f"{folder}/src"]
    assert not subprocess.call([ruff, "check", "--no-cache", "-q"]), folder
    assert not subprocess.call([ruff, "format", "--no-cache", "--check", "-q"]), folder
    assert not importlinter.cli.lint_imports(no_cache=True), folder
    assert not pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider"]), folder

with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
    pool.map(check, sys.argv[1:], chunksize=1)
"""


def test_a_tool_can_be_deleted(render, tmp_path):
    whole = render(**LONG_NAMES)
    for tool in TOOLS:
        shutil.copytree(whole, tmp_path / tool)
        shutil.rmtree(next(tmp_path.glob(f"{tool}/src/*/tools/{tool}")))
    assert len(TOOLS) >= 8
    python("-c", CHECK, str(whole), *(str(tmp_path / tool) for tool in sorted(TOOLS)))
