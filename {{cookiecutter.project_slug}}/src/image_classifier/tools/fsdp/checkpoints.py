"""Checkpoints of a sharded run: folders, in which each rank writes its part by torch's DCP.

A folder is written as `step_<n>.partial`, and renamed to `step_<n>` when all of it is on the disk.
It holds a safetensors file of each rank, `run.json` with all that is not a tensor, and digests.
DCP's own format is not used: its index is a pickle, which could run code.
"""

import hashlib
import json
import shutil
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from ...checkpoints import NUMBERS, Checkpoints, DamagedError, TrainState, parse_checkpoint
from ...errors import UserError
from ...runtime.distributed import World, local_part
from ...runtime.files import open_plain, read_object, sync_folder, write_json, write_whole

RUN, DIGESTS = "run.json", "digests.json"


class ShardedCheckpoints(Checkpoints):
    """The checkpoints of a sharded run. All ranks write, while training waits.

    Rank 0 also writes `best.pt` and, at the end, `last.pt`, as a run without FSDP does.
    """

    def load(self, state: TrainState, saved: dict[str, Any]) -> None:
        """Fill each rank's part of `state`, from a folder of any number of ranks or from a file.

        Raises:
            LookupError, TypeError, ValueError: if it is of another model or optimizer.
        """
        values = saved["state"]
        folder = saved.get("folder")
        found = read_sizes(folder) if folder else tensors_of(values)
        groups = [group["params"] for group in values["optimizer"]["param_groups"]]
        if groups != [g["params"] for g in state.optimizer.state_dict()["param_groups"]]:
            raise ValueError("its optimizer has other groups of weights")
        make_optimizer_state(state.optimizer, found)
        tensors = sharded_tensors(state)
        if tensors.keys() != found.keys():
            name = min(tensors.keys() ^ found.keys())
            raise ValueError(f"only one of them has {name!a}")
        if folder:
            read_tensors(folder, tensors)
            self.last = folder
        else:
            for name, tensor in tensors.items():
                copy_part(found[name], tensor)
        state.load_numbers(values)

    def fill(self, model: nn.Module, weights: dict[str, Tensor]) -> None:
        """Give `model` this rank's part of the weights of a file."""
        for name, tensor in model.state_dict().items():
            copy_part(weights[name], tensor)

    def save(self, state: TrainState, log: dict[str, float]) -> None:
        """Save `state` and the state of the log; training waits until all of it is on the disk.

        Raises:
            FaultError: if the weights are not finite, or the disk is full.
        """
        self.saved_step = state.step
        self.saved_at = monotonic()
        for model in filter(None, (state.model, state.ema)):
            self.world.broadcast_buffers(model)
        tensors = sharded_tensors(state)
        values = state.state_dict()
        # Each rank checks all parts: a sum of squares is finite if all of them are.
        parts = [part for part in map(local_part, tensors.values()) if part.is_floating_point()]
        squares = torch.stack(torch._foreach_norm(parts)).square().sum()
        self.world.all_reduce_sum(squares)
        saved = {
            "state": {name: values[name] for name in (*NUMBERS, "decision")}
            | {"optimizer": {"param_groups": values["optimizer"]["param_groups"]}, "scaler": {}},
            **self.identity,
            "report": log,
            "torch": str(torch.__version__),
        }
        path = self.folder / f"step_{state.step:08d}"
        partial = path.with_suffix(".partial")
        with self.saving(state.step, squares):
            if self.world.is_main:
                for left in self.folder.glob("step_*.partial"):  # by a run that was killed
                    shutil.rmtree(left)
                partial.mkdir(parents=True)
            self.world.all_true(True)  # no rank writes before there is a folder
            with unwrapped():
                writer = HuggingFaceStorageWriter(str(partial), save_distributed=True)
                dcp.save(tensors, storage_writer=writer)
            digests = gather_digests(partial, self.world)
            is_shared = all((partial / name).is_file() for name in digests)
            if not self.world.all_true(is_shared or not self.world.is_main):
                raise UserError(
                    f"{str(self.folder)!a} is not on a disk that all machines share, as "
                    "--compute.parallel fsdp needs it: set --run.dir"
                )
            if state.is_best:
                self.save_best(state, saved)
            if self.world.is_main:
                write_json(partial / RUN, saved)
                write_json(partial / DIGESTS, digests | {RUN: digest_of(partial / RUN)})
                sync_folder(partial)
                shutil.rmtree(path, ignore_errors=True)  # a damaged one, which was skipped
                partial.rename(path)
                sync_folder(self.folder)
        self.last = path

    def save_best(self, state: TrainState, saved: dict[str, Any]) -> None:
        """Gather the weights, one after the other; rank 0 writes them in the form of one file."""
        nets = {"model": state.model, "ema": state.ema}
        gathered: dict[str, Any] = {"ema": None, "optimizer": {"state": {}, "param_groups": []}}
        for name, net in nets.items():
            if net is not None:
                weights = {key: whole_on_main(w, self.world) for key, w in net.state_dict().items()}
                gathered[name] = weights
        if self.world.is_main:
            saved = saved | {"state": saved["state"] | gathered}
            write_whole(self.folder / "best.pt", lambda file: torch.save(saved, file))
            self.write_weights(gathered["ema"] or gathered["model"], saved)

    def __exit__(self, *error: object) -> None:
        """At the end of a run, write `last.pt` in the form of one file."""
        super().__exit__(*error)
        if error[0] is None and self.world.is_main and self.last.is_dir():
            saved = read_whole(json.loads((self.last / RUN).read_text()) | {"folder": self.last})
            with self.needs_space(self.kept_step):
                write_whole(self.folder / "last.pt", lambda file: torch.save(saved, file))


def read_folder(path: Path) -> dict[str, Any]:
    """What a folder holds beside tensors, which stay there.

    Raises:
        DamagedError: if it is not what was written.
        UserError: if it holds anything but what is written there.
    """
    try:
        digests = read_object(path / DIGESTS)
        saved = read_object(path / RUN)
        found = {file.name: digest_of(file) for file in path.iterdir() if file.name != DIGESTS}
    except OSError as error:
        raise DamagedError(f"{str(path)!a} is damaged: {error.strerror}") from error
    if found != digests:
        raise DamagedError(f"{str(path)!a} is damaged: its files are not those that were written")
    state = saved.get("state")
    # The weights are checked against the model when they are read.
    placeholder = {"model": {"weights": torch.zeros(())}, "ema": None}
    saved["state"] = state | placeholder if isinstance(state, dict) else None
    parse_checkpoint(saved, path, "")
    return saved | {"folder": path}


def read_whole(saved: dict[str, Any]) -> dict[str, Any]:
    """All of a checkpoint that `read_folder` found, as a file would hold it.

    Raises:
        ValueError: if the tensors can't be read.
    """
    sizes = read_sizes(saved["folder"])
    tensors = {name: torch.empty(at.size, dtype=at.properties.dtype) for name, at in sizes.items()}
    read_tensors(saved["folder"], tensors, is_alone=True)
    state = saved["state"] | {"model": {}, "ema": {}}
    state["optimizer"] = {**state["optimizer"], "state": {}}
    for name, tensor in tensors.items():
        part, _, key = name.partition(".")
        if part == "optimizer":
            number, _, key = key.partition(".")
            state["optimizer"]["state"].setdefault(int(number), {})[key] = tensor
        else:
            state[part][key] = tensor
    state["ema"] = state["ema"] or None
    return {name: value for name, value in saved.items() if name != "folder"} | {"state": state}


def tensors_of(values: dict[str, Any]) -> dict[str, Tensor]:
    """All tensors of a checkpoint's state, by the names that they have in a folder."""
    tensors = {
        f"{net}.{name}": tensor
        for net in ("model", "ema")
        for name, tensor in (values[net] or {}).items()
    }
    return tensors | {
        f"optimizer.{number}.{name}": tensor
        for number, state in values["optimizer"]["state"].items()
        for name, tensor in state.items()
    }


@torch.no_grad()
def sharded_tensors(state: TrainState) -> dict[str, Tensor]:
    """All tensors of `state`; those of the optimizer are parts, and become `DTensor`s."""
    weights = weights_of(state.optimizer)
    tensors = tensors_of(state.state_dict())
    for name, tensor in tensors.items():
        if name.startswith("optimizer.") and not name.endswith(".step"):
            weight = weights[int(name.split(".")[1])]
            tensors[name] = DTensor.from_local(
                tensor,
                weight.device_mesh,
                weight.placements,
                run_check=False,
                shape=weight.shape,
                stride=weight.stride(),
            )
    seen: set[int] = set()
    for name, tensor in tensors.items():  # safetensors refuses names of one tensor
        place = local_part(tensor).data_ptr()
        if place and place in seen:  # an empty part has none
            tensors[name] = tensor.clone()
        seen.add(place)
    return tensors


@torch.no_grad()
def make_optimizer_state(optimizer: torch.optim.Optimizer, names: Iterable[str]) -> None:
    """Make room for the optimizer's state of these names, which AdamW makes in its first step."""
    weights = weights_of(optimizer)
    for name in names:
        if name.startswith("optimizer."):
            _, number, key = name.split(".")
            part = weights[int(number)].to_local()
            room = part.new_zeros(()) if key == "step" else torch.zeros_like(part)
            optimizer.state[weights[int(number)]].setdefault(key, room)


def weights_of(optimizer: torch.optim.Optimizer) -> list[DTensor]:
    """The weights in the order in which the optimizer numbers them."""
    return [weight for group in optimizer.param_groups for weight in group["params"]]


@torch.no_grad()
def copy_part(whole: Tensor, target: Tensor) -> None:
    """Fill this rank's part of `target` from all of it.

    Raises:
        ValueError: if it has another shape.
    """
    if whole.shape != target.shape:
        raise ValueError(f"a tensor of {tuple(target.shape)} was {tuple(whole.shape)}")
    if isinstance(target, DTensor):
        parts = whole.chunk(target.device_mesh.size())  # there are fewer where a tensor is short
        rank = target.device_mesh.get_local_rank()
        target = target.to_local()
        whole = parts[rank] if rank < len(parts) else whole[:0]
    target.copy_(whole)


def whole_on_main(tensor: Tensor, world: World) -> Tensor | None:
    """All of a tensor in CPU memory on rank 0; all ranks take part in that."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu() if world.is_main else None


def read_sizes(folder: Path) -> dict[str, Any]:
    """The size and dtype of each tensor in a folder, by its name.

    Raises:
        ValueError: if they can't be read.
    """
    try:
        sizes = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    except Exception as error:  # what the library raises of files that it did not write
        raise ValueError(f"its weights can't be read: {error}") from error
    for name, found in sizes.items():  # DCP would leave memory as it is where a part is missing
        if sum(chunk.sizes.numel() for chunk in found.chunks) != found.size.numel():
            raise ValueError(f"parts of {name!a} are missing")
    return sizes


def read_tensors(folder: Path, tensors: dict[str, Tensor], *, is_alone: bool = False) -> None:
    """Fill `tensors`, which may be sharded, from a folder that any number of ranks wrote.

    Raises:
        ValueError: if they can't be read, or have other sizes.
    """
    reader = HuggingFaceStorageReader(str(folder))
    with warnings.catch_warnings(), unwrapped(ValueError):
        warnings.simplefilter("ignore")  # that one process reads alone
        dcp.load(tensors, storage_reader=reader, no_dist=is_alone)


@contextmanager
def unwrapped(kind: type[Exception] | None = None) -> Iterator[None]:
    """A block in which the error of a rank replaces that of DCP, which no `except` expects."""
    try:
        yield
    except CheckpointException as error:
        cause = min(error.failures.items())[1][0]
        raise (kind(f"its weights can't be read: {cause}") if kind else cause) from error


def gather_digests(folder: Path, world: World) -> dict[str, str]:
    """The digests of all ranks' files by their names; each rank reads what it has written."""
    own = {path.name: digest_of(path) for path in folder.glob(f"shard-{world.rank + 1:05}-*")}
    found: list[dict[str, str]] = [{}] * world.size
    dist.all_gather_object(found, own)
    return {name: digest for digests in found for name, digest in digests.items()}


def digest_of(path: Path) -> str:
    """The digest of a file."""
    with open_plain(path) as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:32]
