"""What tools add to the rest: a tool is a folder in `tools/`, and any of them may be deleted.

The rest knows no tool by name: it looks for modules of these names in all of them.

- `command.py` is the command of the tool's name: `main(words) -> exit code`. With
  `RESULT_IS_IN_FILES` it has done its work even if what it prints is lost.
- `options.py` adds options: see `options.py` of the package.
- `presets.py` adds presets: `PRESETS`, functions that return a `Config`; one with the name
  of a preset of the core replaces it.
- `dataset.py` is the dataset of the tool's name: a function of that name.
- `labels.py` reads labels from a table: `table`, `check_files`.
- `source.py` changes a dataset: `without_quarantine` leaves out files, `with_prepared` has others.
- `decoder.py` reads files that Pillow does not: `read_tiff`.
- `unreadable.py` knows a `CURE` for unreadable images, or passes over them: `open_note`.
- `networks.py` has the models `--model.name <tool>/...`: `build`, `published`, `pretrained_config`.
- `network.py` changes a network: `change_network` for every command, `change_training` one that
  trains, of which `plain_weights` makes the weights of the network without that change.
- `policy.py` changes training images before they are normalized: `open_policy`.
- `loss.py` changes the loss or the targets: `change_loss`.
- `parallel.py` is another way to train on several ranks: `open_parallel`. If its checkpoints are
  folders, `checkpoints.py` reads them: `read_folder`, `read_whole`.
- `precision.py` measures which number format is faster on a CPU: `find_gain`.
- `observer.py` adds warnings, metrics and sentences to the log: `open_observer`.
- `watcher.py` surrounds the steps of a run, and is told of each: `watch`.
- `tracker.py` is the tracker of the tool's name: `open_tracker`, and perhaps `LIBRARY`.
- `page.py` writes the page of a run: `write_page`; `heat.py` what its model looked at, for that
  page: `open_explainer`.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from .errors import UserError


@cache
def find_tools(module: str, only: str = "*") -> dict[str, ModuleType]:
    """The modules `tools/<name>/<module>.py` that are there, by the tool's name: `find-lr`."""
    tools = find_spec(f"{__package__}.tools")
    found = {}
    for folder in (tools and tools.submodule_search_locations) or ():
        for path in sorted(Path(folder).glob(f"{only.replace('-', '_')}/{module}.py")):
            name = path.parent.name
            found[name.replace("_", "-")] = import_module(f"{tools.name}.{name}.{module}")
    return found


def functions(module: str, name: str) -> list[Callable]:
    """The functions `name` of the modules `tools/*/<module>.py` that have one, by the tools' names.

    Where they change one thing after another, that is the order.
    """
    found = find_tools(module).values()
    return [getattr(tool, name) for tool in found if hasattr(tool, name)]


def function(module: str, name: str) -> Callable | None:
    """The first of `functions`; None if there is none."""
    return next(iter(functions(module, name)), None)


def find_tool(module: str, name: str) -> ModuleType | None:
    """The module `tools/<name>/<module>.py`; None if it was deleted."""
    return find_tools(module, only=name).get(name)


def need_tool(module: str, name: str, what: str) -> ModuleType:
    """The module `tools/<name>/<module>.py`, which `what` needs.

    Raises:
        UserError: if it is not there.
    """
    if (found := find_tool(module, name)) is None:
        raise UserError(f"{what} needs a tool that is not here: pretuned add {name}")
    return found
