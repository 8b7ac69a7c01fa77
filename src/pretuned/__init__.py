"""The `pretuned` command: make a project from the template that comes with it."""

import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent

# Bundled in the wheel; around us in a checkout.
TEMPLATE = _HERE / "template" if (_HERE / "template").is_dir() else _HERE.parents[1]

# The rules for answers belong to the template, where plain cookiecutter looks for them as well.
sys.path.append(str(TEMPLATE))
