"""What a checkpoint holds is checked once, and read at once: nothing else is believed of a file."""

import hashlib
import math
import os
import re
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from conftest import changed, run_ranks
from torch import Tensor, nn

from image_classifier import checkpoint
from image_classifier import evaluate as trained
from image_classifier.checkpoint import Checkpoints
from image_classifier.cli import main
from image_classifier.config import (
    ComputeConfig,
    Config,
    RunConfig,
    UserError,
)
from image_classifier.data.datasets.source import Source
from image_classifier.evaluate import load_model
from image_classifier.models import (
    Best,
    load_best,
    load_pretrained,
    read_checkpoint,
    weights,
)
from image_classifier.optim import begin_momentum, build_optimizer
from image_classifier.precision import Precision
from image_classifier.runtime.distributed import World, join_world
from image_classifier.train_state import TrainState

CPU = World(torch.device("cpu"))
SPARSE, META = torch.eye(4).to_sparse(), torch.zeros(4, 4, device="meta")
SOURCE = Source(torch.arange(2), ("ant", "bee"), torch.zeros(2, 8, 8, 3, dtype=torch.uint8))


def config_of(name: str) -> Config:
    """A run with an optimizer, and averaged weights."""
    return changed(Config(), optim__name=name, optim__lr=1e-3, optim__ema_decay=0.5)


def new_state(config: Config) -> TrainState:
    """A small run before its first step, with a scaler."""
    model = nn.Sequential(nn.Linear(4, 4, False), nn.Linear(4, 4, False), nn.Linear(4, 2))
    optimizer = build_optimizer(config.optim, model)
    precision = Precision("fp32", config.compute, config.optim, CPU.device)
    precision.scaler = torch.amp.GradScaler("cpu")
    return TrainState(model, optimizer, precision, deepcopy(model), config.optim.ema_decay)


def step(state: TrainState) -> None:
    """Train on a batch."""
    state.precision.backward(state.model(torch.eye(4)).square().sum())
    state.precision.step(state.optimizer)
    state.advance()


@cache
def saved_by(name: str) -> dict[str, Any]:
    """What a run with an optimizer has saved after two steps, as it is read from its file."""
    with TemporaryDirectory() as folder:
        config = changed(config_of(name), run__dir=folder)
        state, checkpoints = new_state(config), Checkpoints(config, CPU, SOURCE)
        step(state)
        step(state)
        checkpoints.save(state, {"loss": 1.0, "step": 1})
        checkpoints.wait()
        saved = read_checkpoint(Path(folder, "checkpoints", "last.pt"))
        saved["state"]["optimizer"]["param_groups"] = [  # most is as the config says, and not read
            {key: group[key] for key in ("params", "lr")}
            for group in saved["state"]["optimizer"]["param_groups"]
        ]
        return saved


@cache
def poisons() -> list[Any]:
    """What nobody would save in any place."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kinds of tensors that are to go, or to come
        tensors = [
            SPARSE,
            META,
            torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
            torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        ]
    tensors += [torch.zeros(2, 3, 5), torch.zeros(0), torch.ones(3, dtype=torch.complex64)]
    numbers = [None, "text", "", -7, 10**18, 10**400, 0.5, math.nan, math.inf, True]
    containers = [[], {}, [None], [[]], {0: 1.0}, {"": {}}, (1, 2)]
    return [*numbers, *containers, *tensors, nn.Parameter(torch.ones(3))]


def spoiled(value: object, where: str = "") -> Iterator[tuple[str, Any]]:
    """`value` with each part of it replaced by each poison in turn, left out, or added to."""
    yield from ((f"{where} = poison {n}", poison) for n, poison in enumerate(poisons()))
    if isinstance(value, Tensor):
        yield f"{where}: another type", value.to(torch.int32)
        yield f"{where}: complex", value.to(torch.complex64)
        yield f"{where}: sparse", value.to_sparse()
        yield f"{where}: without numbers", value.to("meta")
        yield f"{where}: flat", value.flatten()[:-1]
        yield f"{where}: endless", value.flatten()[:1].expand(10**12)
    if isinstance(value, dict):
        annotated = OrderedDict(value)
        annotated._metadata = 5  # of which torch thinks that it is its own
        yield f"{where}: annotated", annotated
        for key, inner in value.items():
            others = {name: other for name, other in value.items() if name != key}
            yield f"{where}: no {key}", others
            yield f"{where}: {key} by a number", others | {12345: inner}
            for name, one in spoiled(inner, f"{where}.{key}"):
                yield name, value | {key: one}
    elif isinstance(value, list | tuple):
        yield f"{where}: one more", [*value, *value[-1:]]
        yield f"{where}: one less", [*value[:-1]]
        for place, inner in enumerate(value):
            for name, one in spoiled(inner, f"{where}.{place}"):
                yield name, [*value[:place], one, *value[place + 1 :]]


def is_sound(saved: dict[str, Any], state: TrainState, best: Best) -> bool:
    """Whether a run can go on from what was read, and a model be used."""
    before = state.step
    begin_momentum(state.optimizer)  # as `Freeze` does
    step(state)
    torch.full((), saved["report"]["loss"])  # as `Report` does
    parts = (state.model, state.ema)
    tensors = [tensor for part in parts for tensor in part.state_dict().values()]
    return (
        0 <= before <= 2**53
        and saved["report"]["step"] <= before
        and math.isfinite(math.fsum([*best.mean, *best.std, state.best_top1]))
        and min(best.std) > 0
        and all(tensor.isfinite().all() for tensor in tensors)
        and all(values for values in state.optimizer.state.values())
    )


def put(saved: dict[str, Any], place: str, value: object) -> dict[str, Any]:
    """`saved` with another value at a place such as `state/step`."""
    key, _, rest = place.partition("/")
    return saved | {key: put(saved[key], rest, value) if rest else value}


def refusal(saved: object, state: TrainState, checkpoints: Checkpoints) -> str:
    """Why a run can't go on from what was read, or a model not be used; nothing if both can."""
    last = checkpoints.folder / "last.pt"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "read_saved", lambda _: (saved, ""))
        patch.setattr(checkpoint, "read_checkpoint", lambda _: saved)
        try:
            best = load_best(last)
            checkpoints.resume(state)
        except UserError as error:
            return str(error)
    assert is_sound(saved, state, best)
    return ""


@pytest.mark.parametrize("name", ["sgd", "adamw", "muon"])
def test_what_was_not_saved_so_is_refused_in_a_line_or_does_no_harm(
    name: str, tmp_path: Path
) -> None:
    config, saved = changed(config_of(name), run__dir=str(tmp_path)), saved_by(name)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.pt").touch()
    checkpoints = Checkpoints(config, CPU, SOURCE)
    assert refusal(saved, new_state(config), checkpoints) == ""
    cases = spoiled(saved)
    if name != "sgd":  # all else is the same
        parts = spoiled(saved["state"]["optimizer"])
        cases = ((what, put(saved, "state/optimizer", part)) for what, part in parts)
    said, state = {}, new_state(config)
    for what, case in cases:
        said[what] = refusal(case, state, checkpoints)
        state = state if said[what] else new_state(config)  # it has learned
    lines = list(filter(None, said.values()))
    assert [line for line in lines if not line.isprintable() or len(line) > 500] == []
    assert len(lines) > 0.9 * len(said) > 600


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("state/step", -7, "state.step is -7, not a whole number from 0 to 9.0072e+15"),
        ("state/model/0.weight", SPARSE, "state.model.0.weight is a Tensor, not a dense tensor"),
        ("state/model", {0: torch.eye(4)}, "state.model is a dict, not a dict by str"),
        ("state/optimizer/state", {}, "holds another model: its optimizer state is empty"),
        ("state/scaler", {"scale": 1.0}, "state.scaler has no growth_factor"),
        ("std", [0.5, 0.5], "std is a list, not a list of 3"),
        ("std", [0.5, 0.0, 0.5], "std.1 is 0.0, not a number from 1e-06"),
        ("config/data", 5, "of another version of this project: there is no --data"),
        ("config/epochs", math.nan, "of another version of this project: --epochs nan"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_its_place(
    place: str, value: object, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "checkpoints" / "last.pt"
    path.parent.mkdir()
    torch.save(put(saved_by("sgd"), place, value), path)
    config = changed(config_of("sgd"), run__dir=str(tmp_path))
    with pytest.raises(UserError, match=re.escape(said)):
        Checkpoints(config, CPU, SOURCE).resume(new_state(config))
    if place != "state/optimizer/state":  # which only a run needs
        with pytest.raises(UserError, match=re.escape(said)):
            load_pretrained(RunConfig(init_from=str(path)), config.model, CPU)
        assert main(["evaluate", str(path)]) == 2
        line = capsys.readouterr().err
        assert said in line
        assert line.count("\n") == 1


def test_all_that_is_known_of_a_checkpoint_is_of_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, next_path = tmp_path / "best.pt", tmp_path / "next.pt"
    torch.save(saved_by("sgd"), path)
    torch.save(put(saved_by("sgd"), "state/step", 9), next_path)
    content = path.read_bytes()
    is_zipfile = zipfile.ZipFile

    def save_another(*arguments: object) -> zipfile.ZipFile:
        next_path.replace(path)
        return is_zipfile(*arguments)

    monkeypatch.setattr(zipfile, "ZipFile", save_another)
    best = load_best(path)
    assert (best.step, best.digest) == (2, hashlib.blake2b(content).hexdigest()[:32])


def opened_while_saved(folder: Path) -> tuple[int, int]:
    """The step that a rank opens if it is saved anew after rank 1 has read; how often it reads."""
    reads = []

    def load(path: Path) -> Best:
        reads.append(path)
        rank_1_is_early = os.environ["RANK"] == "1" and len(reads) == 1
        return load_best(folder / "old.pt" if rank_1_is_early else path)

    trained.load_best = load
    compute = ComputeConfig(device="cpu")
    with join_world(compute) as world:
        return load_model(str(folder / "best.pt"), compute, world).step, len(reads)


def test_all_ranks_evaluate_the_same_weights_while_a_run_goes_on(
    trained_once: Path, tmp_path: Path
) -> None:
    saved = read_checkpoint(trained_once / "checkpoints" / "best.pt")
    torch.save(saved, tmp_path / "best.pt")
    torch.save(put(saved, "state/best_top1", 0.0), tmp_path / "old.pt")
    ranks = run_ranks(2, opened_while_saved, tmp_path)
    assert ranks == [(saved["state"]["step"], 2)] * 2
