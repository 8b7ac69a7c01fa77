"""`search`: search for better values of knobs."""

from dataclasses import dataclass
from typing import Literal

from ...config import Config
from ...errors import UserError
from ...extensions import need_tool, within
from ...runtime.command_line import command, parse, summary, take_preset
from ...runtime.config_dict import changed_knobs, sections
from ...runtime.launch import attempt
from ...runtime.platform import install_command

RESULT_IS_IN_FILES = True
RAY = {
    "RAY_kill_child_processes_on_worker_exit": "false",  # runs are to save, on SIGTERM
    "RAY_AIR_NEW_OUTPUT": "0",  # the new one prints tables even at `verbose=0`
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
}


@dataclass(frozen=True)
class SearchOptions(Config):
    """What to search, how, on what share of the machine, and every knob of training."""

    space: str = ""  # name of a search space, see tools/search/spaces.py; default: the preset's
    trials: int = within(12, 1, 100_000)  # configs to try; more than before: it resumes
    search: Literal["tpe", "random", "grid"] = "tpe"  # who proposes configs. tpe: Optuna's
    # Bayesian search
    scheduler: Literal["asha", "hyperband", "none"] = "asha"  # who ends bad trials early. asha:
    # at each rung a trial continues if it is among the best so far; hyperband: the same in several
    # brackets, whose first rungs are later and later; none: train all in full
    min_epochs: float = within(0.0, 0)  # of each trial, the first rung; 0: epochs / reduction^2.
    # Trials are evaluated at least so often
    reduction: int = within(3, 2, 100)  # one in so many continues; the next rung is so many times
    # as far
    max_concurrent: int | Literal["auto"] = within("auto", 1, 4096)  # trials at once; auto: one per
    # GPU, or one per core
    cpus: int | Literal["auto"] = within("auto", 1, 4096)  # cores of a trial; auto: equal shares
    gpus: float | Literal["auto"] = within("auto", 0, 1024)  # of a trial; 0.5: two trials share one
    confirm: int = within(0, 0, 1000)  # at the end, train the best config and the preset's with so
    # many fresh seeds each, and compare them; 0: do not


def main(words: list[str]) -> int:
    """Search for better values of knobs: `search [PRESET] [--FLAG VALUE ...]`."""
    name, preset = take_preset(words, "shapes", "runs/search/{}")
    default = SearchOptions(**sections(preset))
    prog = f"{command('search')} {name}"
    options = parse(SearchOptions, words, prog=prog, about=summary(main), default=default)
    own = {"run.dir", "run.fresh"}  # of the search
    changed = changed_knobs(Config(**sections(options)), preset, own)

    def work() -> None:
        need_tool("saved_runs", "runs", "search")
        need_tool("cluster", "ray-train", "search").prepare_ray(RAY)
        try:
            from .search import search
        except ImportError as error:
            install = install_command("ray[tune]", "optuna")
            raise UserError(f"search needs a library ({error.name}): {install}") from error
        search(name, options, changed)

    return attempt(work)
