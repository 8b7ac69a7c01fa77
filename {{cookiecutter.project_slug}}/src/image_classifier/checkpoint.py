"""Saving a run so that a kill at any moment loses nothing that was saved, and going on from there.

Whatever happens, a name leads to a whole file (`run.write_whole`). `step_<n>.pt` are the newest,
`last.pt` is another name of the newest of them, `best.pt` of the one with the best evaluation.
"""

import json
import re
import zipfile
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from .config import FREE_TO_CHANGE, Config, RunConfig, UserError, flag, flatten, unflatten
from .datasets.source import Source, difference
from .distributed import World
from .run import clear_run, give_name, write_whole
from .state import TrainState


class DamagedError(Exception):
    """A file that is not a whole checkpoint."""


class Checkpoints:
    """The checkpoints of one run folder. Rank 0 writes them; every rank reads them."""

    def __init__(self, config: Config, world: World, source: Source) -> None:
        """Prepare to save a run of `config` on the training images `source`."""
        self.folder = Path(config.run.dir, "checkpoints")
        self.run = config.run
        self.world = world
        self.identity = {
            "config": flatten(config),
            "classes": list(source.classes),
            "fingerprint": source.fingerprint(),
        }
        self.writer = ThreadPoolExecutor(max_workers=1)
        self.pending: Future[None] | None = None

    def resume(self, state: TrainState) -> dict[str, Any] | None:
        """Make `state` the last that was saved, and return all that was saved with it.

        None if nothing was, or with `--run.fresh`: then the run begins, and what an earlier one
        left is deleted. A damaged checkpoint is passed over for the one before it.

        Raises:
            UserError: if the run was another one, or all of its checkpoints are damaged.
        """
        if self.run.fresh:
            clear_run(self.folder.parent, self.world)
        paths = [self.folder / "last.pt", *sorted(self.folder.glob("step_*.pt"), reverse=True)]
        damage: list[str] = []
        for path in paths:
            if not path.exists():
                continue
            try:
                saved = read_checkpoint(path)
            except DamagedError as error:
                damage.append(str(error))
                continue
            self.check_identity(saved)
            try:
                state.load_state_dict(saved["state"])
            except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise self.refusal(misfit(path, error)) from error
            if damage and self.world.is_main:
                print(f"{damage[0]}; using {str(path)!a} (step {state.step})")
            return saved
        if damage:
            raise UserError(
                f"no readable checkpoint in {str(self.folder)!a}: {'; '.join(damage)}. "
                "Move them away, or start over with --run.fresh"
            )
        return None

    def check_identity(self, saved: dict[str, Any]) -> None:
        """Refuse to go on with a run of another config or on other images."""
        for knob, value in self.identity["config"].items():
            was = saved["config"].get(knob)
            is_free = knob.startswith(FREE_TO_CHANGE)
            if knob == "data.where":  # workers cut resized crops otherwise than the device
                is_free = self.identity["config"]["augment.crop"] != "resized"
            if was != value and not is_free:
                raise self.refusal(f"--{flag(knob)} was {was}, is {value}")
        if saved["classes"] != self.identity["classes"]:
            was, now = saved["classes"], self.identity["classes"]
            raise self.refusal(
                f"its {len(was)} classes ({abbreviate(was)}) are not those of the data, "
                f"which has {len(now)} ({abbreviate(now)})"
            )
        if saved["fingerprint"] != self.identity["fingerprint"]:
            raise self.refusal(difference(saved["fingerprint"], self.identity["fingerprint"]))

    def refusal(self, reason: str) -> UserError:
        """What to raise where this run can't go on from its checkpoints."""
        return UserError(
            f"cannot continue {str(self.folder.parent)!a}: {reason}; "
            "take another --run.dir, or start over with --run.fresh"
        )

    def save(self, state: TrainState, report: dict[str, float]) -> None:
        """Save `state` and the report's. The file is written while training goes on."""
        if not self.world.is_main:
            return
        self.wait()
        saved = {
            "state": to_host(state.state_dict()),
            **self.identity,
            "report": report,
            "torch": str(torch.__version__),
        }
        weights = to_host(state.best_model.state_dict()) if state.is_best else None
        self.pending = self.writer.submit(self._write, saved, state.step, weights)

    def _write(self, saved: dict[str, Any], step: int, best: dict[str, Tensor] | None) -> None:
        """Write one checkpoint and let go of the oldest."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step_{step:08d}.pt"
        write_whole(path, lambda file: torch.save(saved, file))
        if best is not None:
            classes = {"classes": json.dumps(saved["classes"])}
            weights = {name: tensor.contiguous() for name, tensor in best.items()}
            content = save(weights, metadata=classes)
            write_whole(self.folder / "best.safetensors", lambda file: file.write(content))
            give_name(path, self.folder / "best.pt")
        # Last, so that a run that goes on from it has all that belongs to it.
        give_name(path, self.folder / "last.pt")
        for old in sorted(self.folder.glob("step_*.pt"))[: -self.run.keep]:
            old.unlink()

    def wait(self) -> None:
        """Return when what was saved is on the disk.

        Raises:
            OSError: if it could not be written.
        """
        if self.pending:
            self.pending.result()

    def __enter__(self) -> "Checkpoints":
        """Nothing more to do."""
        return self

    def __exit__(self, *error: object) -> None:
        """Finish the write that is under way."""
        self.writer.shutdown(wait=True)
        if error[0] is None:
            self.wait()


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What was saved, as tensors in host memory and plain values; the one place that reads them.

    Raises:
        DamagedError: if the file is not what was written: `torch.load` checks no checksum.
        UserError: if it holds anything but tensors and plain values.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
            # We compress nothing: what would unpack to more than the file is a bomb.
            is_bomb = sum(record.file_size for record in records) >= path.stat().st_size or any(
                record.compress_type != zipfile.ZIP_STORED for record in records
            )
            damaged = None if is_bomb else archive.testzip()
            is_program = any(name.endswith("/constants.pkl") for name in archive.namelist())
    # A hostile archive raises more than BadZipFile: of unknown compression, of a password.
    except (zipfile.BadZipFile, OSError, EOFError, RuntimeError, ValueError) as error:
        raise DamagedError(f"{str(path)!a} is damaged: {error}") from error
    if is_program:
        raise UserError(f"refusing to load {str(path)!a}: it is a program (TorchScript)")
    if damaged or is_bomb:
        reason = f"wrong checksum of {damaged!a}" if damaged else "more inside than it is long"
        raise DamagedError(f"{str(path)!a} is damaged: {reason}")
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # Not torch's own words, which advise to load it all the same.
        name = re.search(r"GLOBAL (\S+)", str(error))
        found = f" ({ascii(name[1])[1:-1]})" if name else ""
        raise UserError(
            f"refusing to load {str(path)!a}: "
            f"it holds objects other than tensors and plain values{found}"
        ) from error
    if not is_checkpoint(saved):
        raise UserError(f"{str(path)!a} is not a checkpoint of this project")
    return saved


def is_checkpoint(saved: Any) -> bool:  # noqa: ANN401 - whatever a file may hold
    """Whether `saved` has all that `Checkpoints.save` writes."""
    try:
        state, config, classes = saved["state"], saved["config"], saved["classes"]
        weights = state["ema"] or state["model"]
        return (
            {"fingerprint", "report"} <= saved.keys()
            and isinstance(state["step"], int)
            and all(isinstance(weight, Tensor) for weight in weights.values())
            and all(isinstance(knob, str) for knob in config)
            and all(isinstance(name, str) for name in classes)
        )
    except (TypeError, KeyError, AttributeError):
        return False


@dataclass(frozen=True)
class Best:
    """What is needed to use a trained model."""

    weights: dict[str, Tensor]  # that were evaluated: the averaged ones where there are any
    config: Config
    classes: tuple[str, ...]
    step: int


def load_best(path: Path) -> Best:
    """The weights of a checkpoint with all that is needed to use them.

    Raises:
        UserError: if there is no such file, or it can't be used.
    """
    if not path.is_file():
        raise UserError(f"there is no checkpoint {str(path)!a}")
    try:
        saved = read_checkpoint(path)
    except DamagedError as error:
        raise UserError(str(error)) from error
    state = saved["state"]
    try:
        config = unflatten(saved["config"])
    except (TypeError, KeyError) as error:  # a knob that there is no more
        raise UserError(f"{str(path)!a} is of another version of this project: {error}") from error
    return Best(
        weights=state["ema"] or state["model"],
        config=config,
        classes=tuple(saved["classes"]),
        step=state["step"],
    )


def misfit(path: Path, error: Exception) -> str:
    """What to say when a checkpoint's weights don't fit the model: the first of torch's reasons."""
    reasons = [line.strip() for line in str(error).splitlines()]
    return f"{str(path)!a} holds another model: {reasons[1] if len(reasons) > 1 else reasons[0]}"


def init_from(run: RunConfig, model: nn.Module) -> str:
    """Take the weights of a checkpoint, or of a `.safetensors` file, and return a line on it.

    With no path, or where the run goes on, they stay as they are. A last layer for another number
    of classes stays random.

    Raises:
        UserError: if the file is missing or damaged, or of another model.
    """
    path = run.init_from
    if not path:
        return "random weights"
    if Path(run.dir, "checkpoints", "last.pt").exists() and not run.fresh:
        return "weights of this run; --run.init-from was for its start"
    if not Path(path).is_file():
        raise UserError(f"there is no checkpoint {path!a}")
    try:
        is_plain = path.endswith(".safetensors")
        weights = load_file(path) if is_plain else load_best(Path(path)).weights
    except (OSError, SafetensorError) as error:
        raise UserError(f"--run.init-from {path!a}: {error}") from error
    own = model.state_dict()
    missing = sorted(own.keys() ^ weights.keys())
    if missing:
        raise UserError(
            f"--run.init-from {path!a} has the weights of another model: "
            f"only one of the two has {abbreviate(missing)}"
        )
    unlike = [name for name, tensor in own.items() if weights[name].shape != tensor.shape]
    head = list(own)[-1].rpartition(".")[0]
    others = [name for name in unlike if name.rpartition(".")[0] != head]
    if others:
        raise UserError(
            f"--run.init-from {path!a} has the weights of another model: {others[0]} has "
            f"shape {tuple(weights[others[0]].shape)}, not {tuple(own[others[0]].shape)}"
        )
    model.load_state_dict({k: v for k, v in weights.items() if k not in unlike}, strict=False)
    kept = f"; {head} is new, for other classes" if unlike else ""
    return f"weights from {path!a}{kept}"


def to_host(value: Any) -> Any:  # noqa: ANN401 - any nesting of plain values
    """A copy in host memory, which training does not change. Waits for the device."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: to_host(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(to_host(inner) for inner in value)
    return value


def abbreviate(names: list[str], most: int = 3) -> str:
    """The first few names."""
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")
