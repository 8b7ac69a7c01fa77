"""Look at the answers and at the target folder before the first file is written."""

import json
import sys
from pathlib import Path

# JSON inside a JSON string: nothing that an answer holds can leave the literal.
answers = json.loads({{cookiecutter | tojson | tojson}})
sys.path.insert(0, json.loads({{template_folder | tojson | tojson}}))
sys.dont_write_bytecode = True

from pretuned_answers import RefusedError, check, tools  # noqa: E402


def main() -> None:
    """Refuse what a replayed answer or an overwritten folder would bring past the gate."""
    check(answers)
    tools.chosen(tools.TEMPLATE, answers["tools"], answers["_tools"])
    # `cookiecutter --overwrite-if-exists` replaces whole folders, with the user's files in them.
    if any(Path.cwd().iterdir()):
        raise RefusedError(f"{str(Path.cwd())!a} is not empty; choose another project_slug")


try:
    main()
except RefusedError as error:
    sys.exit(f"ERROR: {error}")
