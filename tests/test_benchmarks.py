"""What benchmarks take from the package is there: most run too long for a test to run them."""

import ast
import importlib
from types import ModuleType

import pytest
from conftest import ROOT

SCRIPTS = sorted(path for part in ("benchmarks", "faults") for path in (ROOT / part).glob("*.py"))


def taken(module, name):
    """What `from module import name` finds.

    Raises:
        ImportError: if it finds nothing.
    """
    owner = importlib.import_module(module)
    if hasattr(owner, name):
        return getattr(owner, name)
    return importlib.import_module(f"{module}.{name}")


def missing(source):
    """What a script takes from the package and is not there: a name, or one of a module's."""
    nodes = list(ast.walk(ast.parse(source)))
    found = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("image_classifier"):
            for alias in node.names:
                try:
                    value = taken(node.module, alias.name)
                except ImportError:
                    yield f"{node.module}.{alias.name}"
                else:
                    found.setdefault(alias.asname or alias.name, []).append(value)
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            values = found.get(node.value.id, ())
            modules = [value for value in values if isinstance(value, ModuleType)]
            if modules and not any(hasattr(value, node.attr) for value in values):
                yield f"{node.value.id}.{node.attr}"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_what_a_benchmark_takes_from_the_package_is_there(script):
    assert not list(missing(script.read_text(encoding="utf-8")))


def test_a_name_that_went_is_found():
    assert list(missing("from image_classifier.parallel import wrap_fsdp")) == [
        "image_classifier.parallel.wrap_fsdp"
    ]
    source = "from image_classifier.runtime import seeding as seeds\nseeds.order_at, seeds.gone"
    assert list(missing(source)) == ["seeds.gone"]
