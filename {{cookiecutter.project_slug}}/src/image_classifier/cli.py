"""The command line: words to a config, the processes that it needs, and one line for a mistake.

The words are understood before torch is imported, so that `--help` and a typo answer at once.
"""

import contextlib
import faulthandler
import gc
import io
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from .config import (
    PREPARED_QUALITY,
    PREPARED_SIDE,
    ComputeConfig,
    Config,
    DataConfig,
    FaultError,
    RunConfig,
    UserError,
)
from .presets import PRESETS
from .printable import printable

# Exit codes. Of some faults they are others, which their classes know.
DONE, FAULT, MISTAKE, INTERRUPTED = 0, 1, 2, 130
# What says that this is not the first start of a job: ours, torchrun's, SLURM's.
RESTARTS = ("RUN_RESTARTS", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line says, and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if not words or words[0] in ("-h", "--help"):
            print(overview())
            return DONE
        return choose("verb", words[0], VERBS)(words[1:])
    except UserError as mistake:
        if os.environ.get("RANK", "0") != "0":
            time.sleep(1)  # rank 0 says the same first, if it is of the same opinion
        print(f"error: {printable(str(mistake))}", file=sys.stderr)
        return MISTAKE
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAULT
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print("\ninterrupted: the same command goes on from the last save", file=sys.stderr)
        return INTERRUPTED


def train_verb(words: list[str]) -> int:
    """Train: `train [PRESET] [--FLAG VALUE ...]`; the same command continues a run."""
    name, preset = take_preset(words, "shapes")
    preset = replace(preset, run=replace(preset.run, dir=f"runs/{name}"))
    presets = "\n".join(f"  {key:<9}{summary(make)}" for key, make in PRESETS.items())
    about = f"Train. Presets, of which this is `{name}`:\n\n{presets}"
    config = parse(Config, words, prog=f"train.py {name}", about=about, default=preset)

    def work() -> None:
        from .train import train

        is_restart = any(os.environ.get(name, "0") != "0" for name in RESTARTS)
        fresh = config.run.fresh and not is_restart
        train(replace(config, run=replace(config.run, fresh=fresh)))

    return run_in_processes(work, config.run, config.compute)


@dataclass(frozen=True)
class EvaluateOptions:
    """What to evaluate."""

    run: Annotated[str, tyro.conf.Positional]  # run folder, or a checkpoint in one
    split: Literal["val", "test", "train"] = "val"  # images to evaluate on
    root: str = ""  # folder of the images, where it is not the one of the training
    processes: int | Literal["auto"] = "auto"  # one per GPU by default
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto: an accelerator if there is one


def evaluate_verb(words: list[str]) -> int:
    """Evaluate the best weights of a run: `evaluate RUN [--split test]`."""
    options = parse(EvaluateOptions, words, prog="evaluate", about="Evaluate a run.")
    compute = ComputeConfig(device=options.device)

    def work() -> None:
        from .evaluate import evaluate_run

        evaluate_run(options.run, options.split, options.root, compute)

    return run_in_processes(work, RunConfig(processes=options.processes), compute)


@dataclass(frozen=True)
class ExportOptions:
    """What to export, and how it is checked."""

    run: Annotated[str, tyro.conf.Positional]  # run folder, or a checkpoint in one
    format: tuple[Literal["onnx", "pt2", "safetensors"], ...] = ("onnx", "pt2", "safetensors")
    # files to write, as `model.<format>`
    out: str = ""  # folder to write them to; default: `export` in the run folder
    raw: bool = False  # normalised float images to logits, in place of pixels to probabilities
    int8: bool = False  # the ONNX file in 8 bits too, if its top-1 stays within 0.5 points
    tolerance: float = 1e-3  # largest difference of a probability to the model's
    split: Literal["val", "test", "train"] = "val"  # whose images are compared
    images: int = 256  # how many of them
    root: str = ""  # folder of the images, where it is not the one of the training


def export_verb(words: list[str]) -> int:
    """Write a trained model for other programs: `export RUN [--format onnx pt2 safetensors]`."""
    options = parse(ExportOptions, words, prog="export", about=summary(export_verb))
    if not options.format:
        raise UserError("--format needs one or more of: onnx, pt2, safetensors")
    if options.int8 and "onnx" not in options.format:
        raise UserError("--int8 is made of the ONNX file: it needs --format onnx")
    for knob, value, low, high in (
        ("tolerance", options.tolerance, 0, 1),
        ("images", options.images, 1, 10**9),
    ):
        if not low <= value <= high:
            raise UserError(f"--{knob} {value:g} is not in {low} .. {high}")

    def work() -> None:
        from .export import Wanted, export

        wanted = Wanted(
            formats=tuple(dict.fromkeys(options.format)),
            folder=options.out,
            is_raw=options.raw,
            tolerance=options.tolerance,
            split=options.split,
            root=options.root,
            num_images=options.images,
            has_int8=options.int8,
        )
        export(options.run, wanted)

    try:
        return run_in_processes(work, RunConfig(processes=1), ComputeConfig(device="cpu"))
    except KeyboardInterrupt:
        print("\ninterrupted: what has been named is whole, the rest is not there", file=sys.stderr)
        return INTERRUPTED


@dataclass(frozen=True)
class PrepareData:
    """Which images, and where to; as for `train`."""

    name: str = "folder"  # a dataset of files
    root: str = "data"  # folder of the images: root/{train,val[,test]}/<class>/ or root/<class>/
    val_fraction: float = 0.2  # of the training images, where the folder has no `val` of its own
    cache: str = ""  # folder to write to; default: ROOT.cache, beside `root`


@dataclass(frozen=True)
class PrepareOptions:
    """What to prepare, and how."""

    data: PrepareData = field(default_factory=PrepareData)
    splits: tuple[Literal["train", "val", "test"], ...] = ("train", "val")  # which images
    side: int = PREPARED_SIDE  # pixels of the shorter side; smaller images stay as they are
    format: Literal["raw", "jpeg"] = "raw"  # raw: fastest; jpeg: an eighth of the space
    quality: int = PREPARED_QUALITY  # of jpeg, up to 100


def prepare_verb(words: list[str]) -> int:
    """Write images once as training needs them: `prepare [PRESET] --data.root FOLDER`."""
    name, images = take_images(words)
    default, about = PrepareOptions(images), summary(prepare_verb)
    options = parse(PrepareOptions, words, prog=f"prepare {name}", about=about, default=default)
    for knob, value, low, high in (
        ("side", options.side, 8, 4096),
        ("quality", options.quality, 1, 100),
    ):
        if not low <= value <= high:
            raise UserError(f"--{knob} {value} is not in {low} .. {high}")
    config = Config(data=DataConfig(**asdict(options.data)))

    def work() -> None:
        from .datasets.prepared import Recipe
        from .prepare import prepare

        recipe = Recipe(options.format, options.side, options.quality)
        prepare(config.data, options.splits, recipe)

    return run_in_processes(work, RunConfig(processes=1), ComputeConfig(device="cpu"))


@dataclass(frozen=True)
class CheckOptions:
    """What to audit, and what to write."""

    data: PrepareData = field(default_factory=PrepareData)
    splits: tuple[Literal["train", "val", "test"], ...] = ()  # which images; default: all there are
    json: str = ""  # file to write everything to that was found
    quarantine: bool = False  # have training leave out what it should: a list in the cache folder


def check_verb(words: list[str]) -> int:
    """Audit the images before training: `check [PRESET] --data.root FOLDER`."""
    name, images = take_images(words)
    default, about = CheckOptions(images), summary(check_verb)
    options = parse(CheckOptions, words, prog=f"check {name}", about=about, default=default)
    config = Config(data=DataConfig(**asdict(options.data)))
    serious = 0

    def work() -> None:
        nonlocal serious
        from .check import check

        serious = check(config.data, options.splits, options.json, options.quarantine)

    try:
        code = run_in_processes(work, RunConfig(processes=1), ComputeConfig(device="cpu"))
    except KeyboardInterrupt:
        print("\ninterrupted: nothing was written", file=sys.stderr)
        return INTERRUPTED
    return code or (FAULT if serious else DONE)


@dataclass(frozen=True)
class BenchOptions(Config):
    """What to measure, and every knob of training."""

    quick: bool = False  # in less than 2 minutes, and less exactly
    rows: tuple[str, ...] = ()  # only these tips, by the names that --tips prints
    dir: str = "runs/bench"  # folder to write bench.json, bench.md and bench.svg to
    tips: bool = False  # only print what each tip is, and measure nothing


def bench_verb(words: list[str]) -> int:
    """Measure what each performance tip buys here: `bench [PRESET] [--quick]`."""
    name, preset = take_preset(words, "shapes")
    sections = [knob.name for knob in fields(Config)]
    default = BenchOptions(**{section: getattr(preset, section) for section in sections})
    about = summary(bench_verb)
    options = parse(BenchOptions, words, prog=f"bench {name}", about=about, default=default)
    config = Config(**{section: getattr(options, section) for section in sections})
    command = f"python train.py {name}"

    def work() -> None:
        from .bench import FULL, QUICK, bench
        from .tips import page

        if options.tips:
            print(page(), end="")
            return
        effort = QUICK if options.quick else FULL
        bench(config, preset, command, Path(options.dir), names=options.rows, effort=effort)

    try:
        return run_in_processes(work, RunConfig(processes=1), ComputeConfig(device="cpu"))
    except KeyboardInterrupt:
        print(f"\ninterrupted: {options.dir}/bench.json has what was measured", file=sys.stderr)
        return INTERRUPTED


VERBS: dict[str, Callable[[list[str]], int]] = {
    "train": train_verb,
    "evaluate": evaluate_verb,
    "export": export_verb,
    "check": check_verb,
    "prepare": prepare_verb,
    "bench": bench_verb,
}


def run_in_processes(work: Callable[[], None], run: RunConfig, compute: ComputeConfig) -> int:
    """Do `work` here, or in as many processes as the config asks for; return the exit code."""
    from .distributed import AGAIN
    from .launch import is_launched, launch, num_processes

    if is_launched():
        return attempt(work)
    processes = num_processes(run, compute)
    if processes > 1:
        return launch(processes, run)
    while (code := attempt(work)) == AGAIN:
        os.environ[RESTARTS[0]] = "1"
        gc.collect()  # what failed may be in reference cycles, with all that it holds
    return code


def attempt(work: Callable[[], None]) -> int:
    """Do `work` and return the exit code; what goes wrong is told."""
    from .distributed import is_echo

    rank = os.environ.get("RANK")
    if not faulthandler.is_enabled():
        faulthandler.enable(sys.__stderr__)  # says the line of a crash in somebody's C
    try:
        work()
    except FaultError as fault:
        if str(fault):  # empty where another rank says it
            line = printable(str(fault))
            print(f"rank {rank}: {line}" if rank else line, file=sys.stderr)
        return fault.code
    except (UserError, BrokenPipeError):
        raise
    except Exception as error:
        account = traceback.format_exc()
        if is_echo(error):
            time.sleep(3)  # until the rank that has gone has said why, and all are stopped
            account = "the connection to another rank is lost"
        # In one piece, so that the accounts of several ranks do not mix.
        where = f" on rank {rank}" if rank else ""
        print(f"{account}\nfailed{where}", file=sys.stderr)
        return FAULT
    return DONE


def parse(
    kind: type,
    words: list[str],
    prog: str,
    about: str,
    default: Any = tyro.MISSING_NONPROP,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """`words` as an instance of `kind`.

    Raises:
        UserError: if they can't be; tyro's account of it in one line.
    """
    if {"-h", "--help"} & set(words):
        return tyro.cli(kind, default=default, args=words, prog=prog, description=about)
    account = io.StringIO()
    try:
        with contextlib.redirect_stdout(account), contextlib.redirect_stderr(account):
            return tyro.cli(kind, default=default, args=words, prog=prog)
    except SystemExit:
        pass
    _, message, *rest = re.split(r"\n *[-─]{8,} *\n?", account.getvalue())
    message = " ".join(message.split()).removeprefix(f"Error parsing {kind.__name__}: ")
    near = re.search(r"Perhaps you meant:\s+(--[\w.-]+)", " ".join(rest))
    raise UserError(message + (f"; did you mean {near[1]}?" if near else ""))


def take_preset(words: list[str], otherwise: str) -> tuple[str, Config]:
    """The preset that `words` begin with, which is taken from them, or another: name and config.

    Raises:
        UserError: if there is none of that name.
    """
    name = words.pop(0) if words and not words[0].startswith("-") else otherwise
    return name, choose("preset", name, PRESETS)()


def take_images(words: list[str]) -> tuple[str, PrepareData]:
    """The preset that `words` begin with, or `folder`: its name, and which images it is about.

    Raises:
        UserError: if there is none of that name.
    """
    name, preset = take_preset(words, "folder")
    data = preset.data
    return name, PrepareData(data.name, data.root, data.val_fraction, data.cache)


def choose(what: str, name: str, table: dict[str, Callable]) -> Callable:
    """The entry `name` of a table.

    Raises:
        UserError: if there is none; it says which there are.
    """
    if name in table:
        return table[name]
    near = get_close_matches(name, table, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UserError(f"no {what} {name!r}; there are: {', '.join(table)}{hint}")


def overview() -> str:
    """The verbs and what they do."""
    lines = [f"  {name:<10}{summary(verb)}" for name, verb in VERBS.items()]
    return "\n".join(["verbs, each with a --help of its own:", "", *lines])


def summary(function: Callable) -> str:
    """The first line of a function's docstring."""
    return (function.__doc__ or "").splitlines()[0]
