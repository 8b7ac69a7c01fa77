"""Checkpoints: a kill at any moment loses nothing that was saved, and the run resumes from there.

A file appears under its name when all of it is on the disk (`write_whole`). `step_<n>.pt` are the
newest, `last.pt` is a hard link to the newest of them, `best.pt` to that of the best weights.
Where weights are sharded, they are folders `step_<n>` in place of files.
"""

import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from time import monotonic
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import KeyPath, tree_leaves, tree_map_with_path

from ..config import FREE_TO_CHANGE, Config, RunConfig
from ..data import Source, are_replaced
from ..errors import FaultError, UserError
from ..extensions import chained, find_tools, flag
from ..metrics import read_decision
from ..models import load_weights
from ..runtime.config_dict import flatten, of_others, to_save
from ..runtime.console import some
from ..runtime.distributed import World
from ..runtime.files import give_name, is_disk_full, tensor_file, write_whole
from ..runtime.run_dir import clear_run
from ..tasks import metric_of
from .reading import (
    WRONG_CONTENT,
    DamagedError,
    first_reason,
    needs_tool,
    newest_first,
    read_checkpoint,
    saved_steps,
)
from .state import TrainState

SAVE_SECONDS = 600.0  # at the latest after which a checkpoint is saved
KEEP = 2  # newest checkpoints kept beside the best


def read_newest(run: RunConfig, world: World) -> dict[str, Any] | None:
    """What the last checkpoint of a run holds: None if there is none, or with `--run.fresh`.

    A damaged checkpoint is skipped for the one before it.

    Raises:
        UserError: if all are damaged, or one is not of this project.
    """
    damage: list[str] = []
    for path in [] if run.fresh else newest_first(Path(run.dir, "checkpoints")):
        try:
            saved = of_folders(path).read_folder(path) if path.is_dir() else read_checkpoint(path)
        except DamagedError as error:
            damage.append(str(error))
            continue
        if damage and world.is_main:
            print(f"{damage[0]}; using {str(path)!a} (step {saved['state']['step']})")
        return saved
    if damage:
        raise UserError(
            f"no readable checkpoint in {run.dir!a}: {'; '.join(damage)}. "
            "Move them away, or start over with --run.fresh"
        )
    return None


def of_folders(path: object) -> ModuleType:
    """The tool that reads checkpoints which are folders, such as `path`.

    Raises:
        UserError: if there is none.
    """
    tool = next(iter(find_tools("checkpoints").values()), None)
    if tool:
        return tool
    raise UserError(f"{str(path)!a} is of sharded weights, which a tool reads: pretuned add fsdp")


class Checkpoints(AbstractContextManager):
    """The checkpoints of one run folder. Rank 0 writes them in a thread; every rank reads them."""

    def __init__(self, config: Config, world: World, source: Source, teacher: str = "") -> None:
        """Of a run of `config` on the training images `source`; `teacher` is its file's digest."""
        self.folder = Path(config.run.dir, "checkpoints")
        self.last = self.folder / "last.pt"
        self.run = config.run
        self.world = world
        # What a run must have in common with a checkpoint to resume from it.
        with world.local_main_first("looking at the training files"):
            self.identity = {
                "config": to_save(config),
                "classes": list(source.classes),
                "fingerprint": source.fingerprint(),
                "files": source.file_digests if world.is_main else {},
                "mean": list(source.mean),
                "std": list(source.std),
                "teacher": teacher,
            }
        # One torch thread: a second team of OpenMP threads would slow down those of training.
        self.writer = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))
        self.pending: Future[None] | None = None
        self.buffers: dict[KeyPath, Tensor] = {}
        self.saved_step = 0  # of the last save, on every rank
        self.saved_at = monotonic()
        self.kept_step = 0  # of the newest checkpoint on the disk

    def resume(self, state: TrainState, saved: dict[str, Any] | None) -> dict[str, float]:
        """Load the checkpoint `saved` into `state`; `--run.fresh` deletes what a run left before.

        Returns the state of the log then; empty if the run begins.

        Raises:
            UserError: if it is of another model.
        """
        if self.run.fresh:
            clear_run(self.folder.parent, self.world)
        if saved is None or not saved["state"]["step"]:  # what a run begins with is made again
            return {}
        try:
            self.load(state, saved)
        except WRONG_CONTENT as error:
            raise self.refusal(f"it holds another model: {first_reason(error)}") from error
        self.kept_step = state.step
        return saved["report"]

    def load(self, state: TrainState, saved: dict[str, Any]) -> None:
        """Fill `state` with the checkpoint `saved`, the weights of which may be in a folder."""
        if "folder" in saved:
            saved = of_folders(saved["folder"]).read_whole(saved)
        state.load_state_dict(saved["state"])

    def load_best(self, state: TrainState) -> None:
        """Fill the model that is evaluated with the weights in best.pt, if it has others.

        Their decision is that of the state then. A deleted link to the newest file is made again.

        Raises:
            UserError: if the file can't be read.
        """
        self.wait()
        path = self.folder / "best.pt"
        newest = self.folder / f"step_{state.step:08d}.pt"
        if state.is_best and self.world.is_main and newest.exists() and not path.exists():
            give_name(newest, path)
        if state.is_best or state.best_step < 0:
            return
        self.world.all_true(True)  # rank 0 has written it
        saved = self.world.read_once(lambda: read_checkpoint(path))["state"]
        self.fill(state.best_model, saved["ema"] or saved["model"])
        state.decision = read_decision(saved)

    def fill(self, model: nn.Module, weights: dict[str, Tensor]) -> None:
        """Give `model` the weights of a file."""
        load_weights(model, weights)

    def check_identity(self, saved: dict[str, Any] | None) -> None:
        """Raise `UserError` with the first difference of a checkpoint, if any, from this run."""
        if saved is None:
            return
        self.check_config(saved["config"])
        if saved["classes"] != self.identity["classes"]:
            was = tuple(saved["classes"])
            now = tuple(self.identity["classes"])
            raise self.refusal(f"its classes ({some(was)}) are not those of the data ({some(now)})")
        if saved["fingerprint"] != self.identity["fingerprint"]:
            raise self.refusal(difference(saved["fingerprint"], self.identity["fingerprint"]))
        for name in ("mean", "std"):
            if list(saved[name]) != (now := self.identity[name]):
                raise self.refusal(f"it normalized with a {name} of {saved[name]}, not of {now}")
        if saved.get("teacher", "") != self.identity["teacher"]:
            raise self.refusal("the file of its teacher was replaced", True)
        # Rank 0 looks at the files.
        if not self.world.all_true(not are_replaced(saved["files"], self.identity["files"])):
            raise self.refusal("training images were replaced under the same names", True)

    def check_config(self, saved: dict[str, Any]) -> None:
        """Raise `UserError` for the first knob that differs and is not free to change."""
        usual = flatten(Config())  # which a knob has that is not saved
        known = usual | saved
        config = usual | self.identity["config"]
        known = known | {"run.best_by": metric_of(known)}
        if reason := needs_tool(of_others(saved), "augment.", "data.", "optim."):
            raise self.refusal(reason)
        for knob, value in config.items():
            was = known[knob]
            is_free = knob.startswith(FREE_TO_CHANGE) and knob != "run.best_by"
            if knob == "data.where":  # workers crop differently from the device
                is_free = config["augment.crop"] != "resized"
            if was != value and not is_free:
                raise self.refusal(f"--{flag(knob)} was {was}, is {value}", knob == "epochs")

    def refusal(self, reason: str, offers_weights: bool = False) -> UserError:
        """The error to raise if this run cannot resume, with what to do instead."""
        # FSDP writes `last.pt` at the end.
        weights = ascii(str(self.last if self.last.exists() else self.folder / "best.pt"))
        onward = f" (with --run.init-from {weights} it trains on from these weights)"
        return UserError(
            f"cannot continue {str(self.folder.parent)!a}: {reason}; "
            f"take another --run.dir{onward * offers_weights}, or start over with --run.fresh"
        )

    @property
    def are_old(self) -> bool:
        """Whether to save now: rank 0 failed to write the last one, or that is too long ago."""
        has_failed = self.pending and self.pending.done() and self.pending.exception()
        is_late = monotonic() - self.saved_at > SAVE_SECONDS
        return self.world.is_main and (bool(has_failed) or is_late)

    def save(self, state: TrainState, log: dict[str, float]) -> None:
        """Save `state` and the state of the log; the file is written while training continues."""
        self.saved_step = state.step
        self.saved_at = monotonic()
        if not self.world.is_main:
            return
        self.wait()  # the last one is written from the same buffers
        saved = {
            "state": to_host(state.state_dict(), self.buffers),
            **self.identity,
            "report": log,
            "torch": str(torch.__version__),
        }
        self.pending = self.writer.submit(self._write, saved, state.is_best)

    def _write(self, saved: dict[str, Any], is_best: bool) -> None:
        """Write one checkpoint under all of its names, `last.pt` last."""
        step = saved["state"]["step"]
        with self.saving(step, saved["state"]):
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"step_{step:08d}.pt"
            write_whole(path, lambda file: torch.save(saved, file))
            if is_best:
                self.write_weights(saved["state"]["ema"] or saved["state"]["model"], saved)
                give_name(path, self.folder / "best.pt")
            give_name(path, self.last)

    @contextmanager
    def saving(self, step: int, state: object) -> Iterator[None]:
        """A block that writes the checkpoint of `step`, after which the oldest are deleted.

        Raises:
            FaultError: if a tensor in `state` is not finite, or the disk is full.
        """
        floats = [x for x in tree_leaves(state) if isinstance(x, Tensor) and x.is_floating_point()]
        if not torch.stack(torch._foreach_norm(floats)).isfinite().all():
            reason = f"weights or optimizer have numbers that are not finite after step {step}"
            raise FaultError(f"{reason}: not saved; earlier checkpoints are kept; lower --optim.lr")
        with self.needs_space(step):
            yield
        self.kept_step = step
        for old in saved_steps(self.folder)[:-KEEP] if self.world.is_main else ():
            shutil.rmtree(old) if old.is_dir() else old.unlink()

    @contextmanager
    def needs_space(self, step: int) -> Iterator[None]:
        """A block that writes a file of `step`; `FaultError` if the disk is full."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            if not is_disk_full(error):
                raise
            kept = f"that of step {self.kept_step} is kept" if self.kept_step else "there is none"
            reason = f"cannot save step {step} in {self.folder}: no space left; {kept}"
            raise FaultError(f"{reason}. Make space, and run the same command to resume") from error

    def write_weights(self, weights: dict[str, Tensor], saved: dict[str, Any]) -> None:
        """Write weights alone, for other programs."""
        about = {name: saved[name] for name in ("classes", "mean", "std")}
        weights = chained("network", "plain_weights", weights, saved["config"])
        content = tensor_file({k: tensor.contiguous() for k, tensor in weights.items()}, about)
        write_whole(self.folder / "best.safetensors", lambda file: file.write(content))

    def wait(self) -> None:
        """Wait until the last save is on the disk; FaultError if it could not be written."""
        if self.pending:
            self.pending.result()

    def account(self, step: int, total_steps: int) -> str:
        """Wait for the last save on all ranks, and return what rank 0 says of a run that stops.

        Raises:
            FaultError: if that step could not be saved.
        """
        self.wait()
        self.world.all_true(True)  # no rank leaves earlier: its end might kill rank 0
        how = f"run the same command{', without --run.fresh,' * self.run.fresh} to resume"
        said = f"saved {self.last} at step {step} of {total_steps}; {how}"
        return said if self.world.is_main else ""

    def __exit__(self, *error: object) -> None:
        """Finish the save that is under way."""
        self.writer.shutdown(wait=True)
        if error[0] is None:
            self.wait()


def to_host(state: dict[str, Any], buffers: dict[KeyPath, Tensor]) -> dict[str, Any]:
    """A copy with all tensors in CPU memory, which training won't change. Waits for the device.

    Those of a CUDA device are in `buffers`, by their place in `state`: the next copy into the same
    buffers overwrites them.
    """

    def copied(place: KeyPath, value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        tensor = value.detach()
        if not tensor.is_cuda:
            return tensor.to("cpu", copy=True)
        if place not in buffers:
            buffers[place] = host_buffer(tensor)
        return buffers[place].copy_(tensor, non_blocking=True)

    copies = tree_map_with_path(copied, state)
    if buffers:
        torch.cuda.synchronize()
    return copies


def host_buffer(tensor: Tensor) -> Tensor:
    """Memory for a copy of `tensor`: page-locked, so that a GPU copies without being waited for."""
    try:
        return torch.empty_like(tensor, device="cpu", pin_memory=True)
    except RuntimeError:  # the system locks no more
        return torch.empty_like(tensor, device="cpu")


def difference(was: str, now: str) -> str:
    """How the images of two fingerprints differ; a space separates how they were prepared."""
    images, _, recipe = was.partition(" ")
    new_images, _, new_recipe = now.partition(" ")
    if images != new_images:
        return "the training images have changed"
    forms = (f"prepared images ({form})" if form else "the files" for form in (recipe, new_recipe))
    return f"it learned from {', not from '.join(forms)}: see --data.cache"
