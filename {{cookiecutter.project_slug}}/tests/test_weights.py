"""Everything that a checkpoint holds is checked when it is read, and it is read at once."""

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

from image_classifier import checkpoint, evaluate
from image_classifier.checkpoint import Checkpoints
from image_classifier.cli import main
from image_classifier.config import (
    ComputeConfig,
    Config,
    RunConfig,
)
from image_classifier.data.datasets.source import Source
from image_classifier.errors import UserError
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


def new_run(name: str, folder: Path) -> tuple[Config, TrainState, Checkpoints]:
    """A run of a small model with an optimizer, averaged weights and a scaler, before a step."""
    config = changed(Config(), optim__name=name, optim__lr=1e-3, optim__ema_decay=0.5)
    config = changed(config, run__dir=str(folder))
    model = nn.Sequential(nn.Linear(4, 4, False), nn.Linear(4, 4, False), nn.Linear(4, 2))
    precision = Precision("fp32", config.compute, config.optim, CPU.device)
    precision.scaler = torch.amp.GradScaler("cpu")
    optimizer = build_optimizer(config.optim, model)
    state = TrainState(model, optimizer, precision, deepcopy(model), config.optim.ema_decay)
    return config, state, Checkpoints(config, CPU, SOURCE)


def step(state: TrainState) -> None:
    """Train on a batch."""
    state.precision.backward(state.model(torch.eye(4)).square().sum())
    state.precision.step(state.optimizer)
    state.advance()


@cache
def saved_by(name: str) -> dict[str, Any]:
    """What a run with an optimizer saved after two steps, as it is read from its file."""
    with TemporaryDirectory() as folder:
        _, state, checkpoints = new_run(name, Path(folder))
        step(state)
        step(state)
        with checkpoints:
            checkpoints.save(state, {"loss": 1.0, "step": 1})
        saved = read_checkpoint(Path(folder, "checkpoints", "last.pt"))
    saved["state"]["optimizer"]["param_groups"] = [  # the rest is as the config says, and not read
        {key: group[key] for key in ("params", "lr")}
        for group in saved["state"]["optimizer"]["param_groups"]
    ]
    return saved


def put(saved: dict[str, Any], place: str, value: object) -> dict[str, Any]:
    """`saved` with another value at a place such as `state/step`."""
    key, _, rest = place.partition("/")
    return saved | {key: put(saved[key], rest, value) if rest else value}


@cache
def wrong_values() -> list[Any]:
    """What no run saves, in any place."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kinds of tensors that are to go, or to come
        tensors = [
            torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
            torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        ]
    tensors += [SPARSE, META, torch.zeros(2, 3, 5), torch.zeros(0), nn.Parameter(torch.ones(3))]
    numbers = [None, "text", "", -7, 10**18, 10**400, 0.5, math.nan, math.inf, True]
    return [*numbers, *tensors, [], {}, [None], [[]], {0: 1.0}, {"": {}}, (1, 2)]


def damaged_copies(value: object) -> Iterator[Any]:
    """`value` with each part of it replaced by each wrong value in turn, left out, or added to."""
    yield from wrong_values()
    if isinstance(value, Tensor):
        yield from (value.to(torch.int32), value.to(torch.complex64), value.flatten()[:-1])
        yield from (value.to_sparse(), value.to("meta"), value.flatten()[:1].expand(10**12))
    elif isinstance(value, dict):
        annotated = OrderedDict(value)
        annotated._metadata = 5  # which torch takes for its own
        yield annotated
        for key, inner in value.items():
            others = {name: other for name, other in value.items() if name != key}
            yield from (others, others | {12345: inner})
            yield from (value | {key: one} for one in damaged_copies(inner))
    elif isinstance(value, list | tuple):
        yield from ([*value, *value[-1:]], value[:-1])
        for place, inner in enumerate(value):
            for one in damaged_copies(inner):
                yield [*value[:place], one, *value[place + 1 :]]


def is_sound(saved: dict[str, Any], state: TrainState, best: Best) -> bool:
    """Whether a run can resume from what was read, and the model be used."""
    before = state.step
    begin_momentum(state.optimizer)  # as `set_frozen` does
    step(state)
    torch.full((), saved["report"]["loss"])  # as the log does
    tensors = [*state.model.state_dict().values(), *state.ema.state_dict().values()]
    return (
        0 <= before <= 2**53
        and saved["report"]["step"] <= before
        and math.isfinite(math.fsum([*best.mean, *best.std, state.best_top1]))
        and min(best.std) > 0
        and all(tensor.isfinite().all() for tensor in tensors)
    )


@pytest.mark.parametrize("name", ["sgd", "adamw", "muon"])
def test_what_no_run_saved_is_refused_in_a_line_or_does_no_harm(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, saved, lines, count = tmp_path / "checkpoints" / "last.pt", saved_by(name), [], 0
    path.parent.mkdir()
    path.touch()
    cases = damaged_copies(saved)
    if name != "sgd":  # the rest is the same
        parts = damaged_copies(saved["state"]["optimizer"])
        cases = (put(saved, "state/optimizer", part) for part in parts)
    _, state, checkpoints = new_run(name, tmp_path)
    for case in (saved, *cases):
        monkeypatch.setattr(weights, "read_saved", lambda _, case=case: (case, ""))
        monkeypatch.setattr(checkpoint, "read_checkpoint", lambda _, case=case: case)
        count += 1
        try:
            best = load_best(path)
            checkpoints.resume(state)
        except UserError as error:
            lines.append(str(error))
        else:
            assert is_sound(case, state, best)
            _, state, _ = new_run(name, tmp_path)
        assert count > 1 or not lines  # the first is as it was saved
    assert [line for line in lines if not line.isprintable() or len(line) > 500] == []
    assert len(lines) > 0.9 * count > 500


@pytest.mark.parametrize(
    ("place", "value", "message"),
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
    place: str, value: object, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "checkpoints" / "last.pt"
    path.parent.mkdir()
    torch.save(put(saved_by("sgd"), place, value), path)
    config, state, checkpoints = new_run("sgd", tmp_path)
    with pytest.raises(UserError, match=re.escape(message)):
        checkpoints.resume(state)
    if place != "state/optimizer/state":  # which only a run needs
        with pytest.raises(UserError, match=re.escape(message)):
            load_pretrained(RunConfig(init_from=str(path)), config.model, CPU)
        assert main(["evaluate", str(path)]) == 2
        line = capsys.readouterr().err
        assert message in line
        assert line.count("\n") == 1


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_read_from_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, next_path = tmp_path / "best.pt", tmp_path / "next.pt"
    torch.save(saved_by("sgd"), path)
    torch.save(put(saved_by("sgd"), "state/step", 9), next_path)
    content, zip_file = path.read_bytes(), zipfile.ZipFile

    def replace_and_open(*arguments: object) -> zipfile.ZipFile:
        next_path.replace(path)
        return zip_file(*arguments)

    monkeypatch.setattr(zipfile, "ZipFile", replace_and_open)
    best = load_best(path)
    assert (best.step, best.digest) == (2, hashlib.blake2b(content).hexdigest()[:32])


def opened_while_saved(folder: Path) -> tuple[int, int]:
    """The step that a rank opens if rank 1 first reads an older file; how often it reads."""
    reads = []

    def load(path: Path) -> Best:
        reads.append(path)
        is_early = os.environ["RANK"] == "1" and len(reads) == 1
        return load_best(folder / "old.pt" if is_early else path)

    evaluate.load_best = load
    compute = ComputeConfig(device="cpu")
    with join_world(compute) as world:
        return evaluate.load_model(str(folder / "best.pt"), compute, world).step, len(reads)


def test_all_ranks_evaluate_the_same_weights_while_a_run_continues(
    trained_once: Path, tmp_path: Path
) -> None:
    saved = read_checkpoint(trained_once / "checkpoints" / "best.pt")
    torch.save(saved, tmp_path / "best.pt")
    torch.save(put(saved, "state/best_top1", 0.0), tmp_path / "old.pt")
    ranks = run_ranks(2, opened_while_saved, tmp_path)
    assert ranks == [(saved["state"]["step"], 2)] * 2
