"""What tools add to the rest: a tool is a folder in `tools/`, and any of them may be deleted.

- `tools/<name>/command.py` is the command of that name: `main(words) -> exit code`. With
  `RESULT_IS_IN_FILES` it has done its work even if what it prints is lost.
- `tools/<name>/<verb>_command.py` is the command `<verb>`, of a tool that has several.
- `tools/<name>/dataset.py` is the dataset of that name: a function called as the tool.
- `tools/<name>/presets.py` adds presets: `PRESETS`, functions that return a `Config`.
- `tools/<name>/tracker.py` is the tracker of that name: `open_tracker`, and perhaps `LIBRARY`.
- `tools/<name>/observer.py` adds warnings, metrics and sentences to the log: `open_observer`.
- `tools/<name>/watcher.py` surrounds the steps of a run, and is told of each: `watch`.
- `tools/prepare/prepared.py` reads what `prepare` wrote: `with_prepared`.
- `tools/check/quarantine.py` leaves out what `check` listed: `without_quarantine`.
- `tools/label_table/labels.py` reads labels from a table: `table`, `check_files`, `has_test_rows`.
- `tools/tiff/pages.py` reads TIFF files that Pillow does not: `read_tiff`.
- `tools/skip_bad_images/bad_images.py` skips unreadable images, counts and lists them.
- `tools/cpu_precision/probe.py` measures which precision is faster on a CPU: `find_gain`.
- `tools/timm/networks.py` has the models of timm: `build`, `published`, `pretrained_config`.
- `tools/gradient_checkpointing/recompute.py` has blocks recompute activations.
- `tools/distill/teacher.py` mixes the predictions of a trained model into the targets: `Teacher`.
- `tools/head_layers/layers.py` gives the last layer features of several depths: `see_layers`.
- `tools/lora/adapters.py` lets matrices learn by adapters of low rank: `add_adapters`, `merged`.
- `tools/report/page.py` writes the report page: `write_page`.
- `tools/explain/heat.py` draws what the model looked at: `heat_maps`, `open_explainer`.
- `tools/fsdp/sharding.py` and `checkpoints.py` shard the weights over all ranks: `Shards`.
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from ..errors import UserError


def find_tools(module: str, only: str = "*") -> dict[str, ModuleType]:
    """The modules `tools/<name>/<module>.py` that are there, by the tool's name: `find-lr`."""
    paths = find_files(f"{only.replace('-', '_')}/{module}.py")
    return {path.parent.name.replace("_", "-"): import_file(path) for path in paths}


def find_commands() -> dict[str, ModuleType]:
    """The modules of the commands that are there, by the names of the commands, in their order."""
    files = {path.parent.name: path for path in find_files("*/command.py")}
    files |= {path.stem.removesuffix("_command"): path for path in find_files("*/*_command.py")}
    return {name.replace("_", "-"): import_file(files[name]) for name in sorted(files)}


def find_files(pattern: str) -> list[Path]:
    """The files in `tools/` whose paths there match a pattern, in the order of the paths."""
    tools = find_spec("..tools", __package__)
    folders = (tools and tools.submodule_search_locations) or ()
    return [path for folder in folders for path in sorted(Path(folder).glob(pattern))]


def import_file(path: Path) -> ModuleType:
    """The module in the file `path` of a tool."""
    return import_module(f"..tools.{path.parent.name}.{path.stem}", __package__)


def find_tool(module: str, name: str) -> ModuleType | None:
    """The module `tools/<name>/<module>.py`; None if it was deleted."""
    return find_tools(module, only=name).get(name)


def need_tool(module: str, name: str, what: str) -> ModuleType:
    """The module `tools/<name>/<module>.py`, which `what` needs.

    Raises:
        UserError: if it was deleted.
    """
    if (found := find_tool(module, name)) is None:
        raise UserError(f"{what} needs tools/{name.replace('-', '_')}, which was deleted")
    return found
