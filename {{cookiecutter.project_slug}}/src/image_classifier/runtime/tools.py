"""What tools add to the rest: a tool is a folder in `tools/`, and any of them may be deleted.

`tools/<name>/command.py` has `main(words) -> exit code`, the command of that name;
`tools/<name>/tracker.py` has `open_tracker`, and `tools/report/page.py` writes the report page.
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType


def find_tools(module: str) -> dict[str, ModuleType]:
    """The modules `tools/<name>/<module>.py` that are there, by the tool's name: `find-lr`."""
    tools = find_spec(f"{__package__.rpartition('.')[0]}.tools")
    found = {}
    for folder in (tools and tools.submodule_search_locations) or ():
        for path in sorted(Path(folder).glob(f"*/{module}.py")):
            name = path.parent.name
            found[name.replace("_", "-")] = import_module(f"{tools.name}.{name}.{module}")
    return found
