"""Saving a run so that a kill at any moment loses nothing that was saved, and going on from there.

Whatever happens, a name leads to a whole file (`run.write_whole`). `step_<n>.pt` are the newest,
`last.pt` is another name of the newest of them, `best.pt` of the one with the best evaluation.
"""

import errno
import json
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from .config import (
    FREE_TO_CHANGE,
    Config,
    FaultError,
    UserError,
    flag,
    flatten,
)
from .data import READ_FILES, Source, are_replaced, difference
from .models import DamagedError, misfit, read_checkpoint
from .optim import check_state
from .runtime.console import some
from .runtime.distributed import World
from .runtime.files import give_name, write_whole
from .runtime.run_dir import clear_run
from .train_state import TrainState

SAVE_SECONDS = 600.0  # at the latest after which a checkpoint is saved
MOST_FAILURES = 3  # saves in a row that may find no space, before the run ends
SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class SaveError(FaultError):
    """The state of the run could not be saved, and what was saved before is kept."""


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
            "files": source.file_digests() if world.is_main else {},
            "mean": list(source.mean),
            "std": list(source.std),
        }
        # Of one thread: a team of its own would be one too many for the cores, and OpenMP then lets
        # the threads of training sleep after every operation, which small models feel threefold.
        self.writer = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))
        self.pending: Future[None] | None = None
        self.saved_step, self.saved_at = 0, monotonic()  # of the last save, on every rank
        self.kept_step = 0  # of the newest checkpoint that is on the disk
        self.num_failures = 0  # in a row
        self.owed: tuple[dict[str, Any], dict[str, Tensor]] | None = None  # the best, not written

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
            self.check_files(saved.get("files", {}))
            try:
                check_state(state.optimizer, saved["state"]["optimizer"], saved["state"]["step"])
                state.load_state_dict(saved["state"])
            except (RuntimeError, ValueError) as error:
                raise self.refusal(misfit(path, error)) from error
            if damage and self.world.is_main:
                print(f"{damage[0]}; using {str(path)!a} (step {state.step})")
            self.kept_step = state.step
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
                raise self.refusal(f"--{flag(knob)} was {was}, is {value}", knob == "epochs")
        if saved["classes"] != self.identity["classes"]:
            was, now = tuple(saved["classes"]), tuple(self.identity["classes"])
            raise self.refusal(f"its classes ({some(was)}) are not those of the data ({some(now)})")
        if saved["fingerprint"] != self.identity["fingerprint"]:
            raise self.refusal(difference(saved["fingerprint"], self.identity["fingerprint"]))
        for name in ("mean", "std"):
            was, now = list(saved[name]), self.identity[name]
            if was != now:
                raise self.refusal(f"it normalised by a {name} of {was}, not of {now}")

    def check_files(self, was: dict[str, str]) -> None:
        """Refuse to go on with other images under the same names; rank 0 looks at the files."""
        now = self.identity["files"]
        if not self.world.all_true(not are_replaced(was, now)):
            raise self.refusal("training images were replaced under the same names", True)
        if was and self.world.is_main and was.get("times") != now.get("times"):
            print(
                "training images were written anew since this run was saved: their names and sizes "
                f"are the same, and the contents of those that were read (up to {READ_FILES})"
            )

    def refusal(self, reason: str, offers_weights: bool = False) -> UserError:
        """What to raise where this run can't go on from its checkpoints.

        With `offers_weights`, its weights may begin another run: one of more epochs, for example,
        as the learning rate of this one has fallen with its length.
        """
        weights = ascii(str(self.folder / "last.pt"))
        onward = f" (with --run.init-from {weights} it trains on from these weights)"
        return UserError(
            f"cannot continue {str(self.folder.parent)!a}: {reason}; "
            f"take another --run.dir{onward * offers_weights}, or start over with --run.fresh"
        )

    @property
    def are_old(self) -> bool:
        """Whether the last save was too long ago, by rank 0's clock."""
        return self.world.is_main and monotonic() - self.saved_at > SAVE_SECONDS

    def save(self, state: TrainState, report: dict[str, float]) -> None:
        """Save `state` and the report's. The file is written while training goes on."""
        self.saved_step, self.saved_at = state.step, monotonic()
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
        """Write one checkpoint and let go of the oldest; a full disk is told, and waited for.

        Raises:
            SaveError: if the weights are not finite, or it was full too often.
            OSError: if the disk fails in another way.
        """
        check_finite(saved, step)
        if best is not None:
            self.owed = saved, best
        try:
            self._write_files(saved, step)
        except (OSError, RuntimeError) as error:
            if not is_full(error):
                raise
            self.num_failures += 1
            account = self._full(saved, step)
            if self.num_failures == MOST_FAILURES:
                raise SaveError(f"{account}; it is the third time in a row") from error
            print(f"{account}; training goes on, and the next save is tried", flush=True)
        else:
            self.num_failures, self.kept_step = 0, step

    def _write_files(self, saved: dict[str, Any], step: int) -> None:
        """A checkpoint under all of its names."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step_{step:08d}.pt"
        write_whole(path, lambda file: torch.save(saved, file))
        if self.owed is not None:
            state, weights = self.owed
            about = {name: json.dumps(saved[name]) for name in ("classes", "mean", "std")}
            whole = {name: tensor.contiguous() for name, tensor in weights.items()}
            content = save(whole, metadata=about)
            write_whole(self.folder / "best.safetensors", lambda file: file.write(content))
            if state is saved:
                give_name(path, self.folder / "best.pt")
            else:  # the disk was full when it was this one's turn
                write_whole(self.folder / "best.pt", lambda file: torch.save(state, file))
            self.owed = None
        # Last, so that a run that goes on from it has all that belongs to it.
        give_name(path, self.folder / "last.pt")
        for old in sorted(self.folder.glob("step_*.pt"))[: -self.run.keep]:
            old.unlink()

    def _full(self, saved: dict[str, Any], step: int) -> str:
        """What to say when there is no space for a checkpoint."""
        needed = sum(tensor.nbytes for tensor in tensors_in(saved["state"])) / 1e6
        free = shutil.disk_usage(self.folder).free / 1e6
        kept = f"that of step {self.kept_step} is kept" if self.kept_step else "there was none yet"
        return (
            f"cannot save step {step} in {self.folder}: no space left "
            f"(about {needed:,.1f} MB are needed, {free:,.1f} MB free); {kept}"
        )

    def wait(self) -> None:
        """Return when what was saved is on the disk.

        Raises:
            SaveError: if it could not be written, and the run can't go on.
            OSError: if the disk failed.
        """
        if self.pending:
            self.pending.result()

    def account(self, step: int, total_steps: int) -> str:
        """What rank 0 is to say of a run that ends at `step`, before its end.

        No rank leaves before the checkpoint is on the disk: what ended the others might end rank 0.

        Raises:
            SaveError: if that step could not be saved.
        """
        if self.world.is_main:
            self.wait()
            self._check_last()
        self.world.all_true(True)
        if not self.world.is_main:
            return ""
        return (
            f"saved {self.folder / 'last.pt'} at step {step} of {total_steps}; "
            "the same command goes on from there"
        )

    def _check_last(self) -> None:
        """Make a failure of the last save known, which no other will make good."""
        if self.num_failures:
            raise SaveError(
                f"the last save in {self.folder} failed: no space left; "
                f"the checkpoint of step {self.kept_step} is kept"
            )

    def __enter__(self) -> "Checkpoints":
        """Nothing more to do."""
        return self

    def __exit__(self, *error: object) -> None:
        """Finish the write that is under way."""
        self.writer.shutdown(wait=True)
        if error[0] is None:
            self.wait()
            self._check_last()


def check_finite(saved: dict[str, Any], step: int) -> None:
    """Refuse to save numbers with which no run could go on.

    Raises:
        SaveError: if one is inf or nan, naming what it belongs to.
    """
    for part in ("model", "ema", "optimizer"):
        floats = [t for t in tensors_in(saved["state"][part]) if t.is_floating_point()]
        if floats and not torch.stack(torch._foreach_norm(floats)).isfinite().all():
            raise SaveError(
                f"the {part} has numbers that are not finite after step {step}: they are not "
                "saved, and the checkpoints before are kept; lower --optim.lr"
            )


def tensors_in(value: Any) -> list[Tensor]:  # noqa: ANN401 - any nesting of plain values
    """All tensors in something that is saved."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for inner in value for tensor in tensors_in(inner)]


def is_full(error: BaseException | None) -> bool:
    """Whether a full disk is behind `error`; torch's own comes after the one that says so."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in SPACE:
            return True
        error = error.__context__
    return False


def to_host(value: Any) -> Any:  # noqa: ANN401 - any nesting of plain values
    """A copy in host memory, which training does not change. Waits for the device."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: to_host(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(to_host(inner) for inner in value)
    return value
