"""FSDP learns what DDP learns, and its checkpoints are as safe and as exact."""

import errno
import json
import os
import pickle
import shutil
import signal
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import (
    after_each_step,
    changed,
    job_of,
    logged,
    losses,
    run_ranks,
    start,
    tiny,
    train_until,
    write_photo,
)
from safetensors.torch import load_file
from torch import nn

from image_classifier.checkpoints import (
    saving as checkpoint_files,
)
from image_classifier.checkpoints.reading import (
    read_checkpoint,
    saved_steps,
)
from image_classifier.checkpoints.saving import read_newest
from image_classifier.checkpoints.state import TrainState
from image_classifier.cli import main
from image_classifier.config import OPTIMIZERS
from image_classifier.data.datasets.source import Source
from image_classifier.errors import FaultError, UserError
from image_classifier.extensions import find_tool
from image_classifier.metrics.table import METRICS, Metric
from image_classifier.models import MODELS, build_model
from image_classifier.optim import build_optimizer
from image_classifier.precision import Precision
from image_classifier.runtime import consensus
from image_classifier.runtime.distributed import (
    World,
    join_world,
    local_part,
)
from image_classifier.runtime.files import write_json
from image_classifier.runtime.signals import StoppedError
from image_classifier.tools.fsdp import (
    checkpoints,
    parallel,
    shards,
)
from image_classifier.train import train

ALONE = World(torch.device("cpu"))
VIT = find_tool("models", "imagenet")
DECAY = {"layer_decay": 0.5} if find_tool("groups", "layer-decay") else {}


@pytest.fixture
def config(config):
    """Two epochs of two steps, on batches that two and three ranks share."""
    config = changed(config, data__batch_size=24, data__limit=60, compute__parallel="fsdp")
    return changed(config, run__log_every_steps=1)


@pytest.fixture
def often(config):
    """A run with all that has a state, which saves after each step."""
    config = changed(config, optim__name="adamw", optim__lr=1e-3, optim__ema_decay=0.9)
    return changed(config, run__evaluate_every_epochs=0.5)


def train_small(config):
    """Train; a vision transformer has three narrow blocks."""
    if VIT:
        VIT.WIDTH, VIT.DEPTH = 48, 3
    return train(config).value("loss")


@pytest.mark.parametrize(
    ("size", "name", "knobs"),
    [
        (2, "resnet9_gn", {"accumulate": 2, "clip_norm": 0.1, "ema_decay": 0.9}),
        *[(3, "vit_s", {"name": "adamw", "lr": 1e-3} | DECAY)] * bool(VIT),
        # It has frozen weights, and BatchNorm.
        *[(3, "airbench", {})] * bool(find_tool("models", "cifar")),
    ],
)
def test_fsdp_learns_as_ddp(config, size, name, knobs, tmp_path):
    knobs = {f"optim__{knob}": value for knob, value in knobs.items()}
    config = changed(config, model__name=name, model__width=16, **knobs)
    config = changed(config, precision="fp32" if size == 2 else "bf16")
    ddp = changed(config, compute__parallel="ddp", run__dir=str(tmp_path / "ddp"))
    run_ranks(size, train_small, config)
    run_ranks(size, train_small, ddp)
    assert losses(config.run.dir) == pytest.approx(losses(ddp.run.dir), rel=1e-3)


class Sharing(nn.Module):
    """Two blocks share a layer, and two layers a weight, as in timm's CoaT."""

    def __init__(self, num_classes):
        super().__init__()
        first, second = (nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU()) for _ in range(2))
        second.append(first[0])
        self.blocks = nn.Sequential(first, second)
        self.one = nn.Linear(3, 3)
        self.other = nn.Linear(3, 3)
        self.other.weight = self.one.weight
        self.head = nn.Linear(3, num_classes)

    def forward(self, images):
        """(batch, 3, side, side) -> (batch, num_classes)."""
        return self.head(self.other(self.one(self.blocks(images).mean((2, 3)))))


def train_sharing(config, work, *arguments):
    """Do `work` with that network."""
    MODELS["sharing"] = lambda _, num_classes, *__: Sharing(num_classes)
    work(changed(config, model__name="sharing", optim__name="adamw"), *arguments)


@pytest.mark.parametrize("size", [2, 3])
def test_blocks_that_share_a_layer_learn_and_are_saved(config, size, tmp_path):
    ddp = changed(config, compute__parallel="ddp", run__dir=str(tmp_path / "ddp"))
    for run in (config, ddp):
        run_ranks(size, train_sharing, run, train_until, 1, False)
        run_ranks(size, train_sharing, run, train)
    assert losses(config.run.dir) == pytest.approx(losses(ddp.run.dir), rel=1e-3)


def test_a_run_goes_on_with_other_numbers_of_ranks_and_ends_in_the_form_of_one_file(
    often, tmp_path, capsys
):
    unbroken = changed(often, run__dir=str(tmp_path / "unbroken"))
    train(unbroken)  # one process, which has all weights
    folder = Path(often.run.dir, "checkpoints")
    for size, step in ((2, 1), (3, 2), (1, 3), (2, 4)):
        run_ranks(size, train_until, often, step, False)
        assert (folder / f"step_{step:08d}").is_dir() == (size > 1)
    assert losses(often.run.dir) == pytest.approx(losses(unbroken.run.dir), rel=1e-3)
    state, same = (
        read_checkpoint(Path(run.run.dir, "checkpoints", "last.pt"))["state"]
        for run in (often, unbroken)
    )
    torch.testing.assert_close(state, same, rtol=1e-3, atol=1e-4)
    averaged = read_checkpoint(folder / "best.pt")["state"]["ema"]
    torch.testing.assert_close(load_file(folder / "best.safetensors"), dict(averaged))
    best = json.loads(Path(often.run.dir, "status.json").read_text())["result"]
    pytest.importorskip("image_classifier.tools.evaluate")
    assert main(["evaluate", often.run.dir]) == 0
    assert f"loss {best['val/loss']:.4f}" in capsys.readouterr().out


def train_with_the_first_best(config):
    """Train, where the first evaluation is the best; the loss of the best weights."""
    values = iter((0.9, 0.1, 0.1, 0.1))
    METRICS["mine"] = Metric(lambda _: next(values), lower_is_better=False)
    return train(config).value("loss")


def test_the_result_is_that_of_the_best_weights_which_a_resumed_run_reads(often):
    config = changed(often, run__best_by="mine", run__timeout_seconds=40.0)
    for _ in range(2):  # the second time it is read from best.pt
        best = run_ranks(2, train_with_the_first_best, config)
        first, *others = [row["val/loss"] for row in logged(config.run.dir) if "val/mine" in row]
        assert best == [pytest.approx(first, rel=1e-6)] * 2
        assert others[-1] != pytest.approx(first, rel=1e-6)


def test_fine_tuning_continues_on_another_number_of_ranks(often, trained_once, tmp_path):
    weights = str(trained_once / "checkpoints" / "best.pt")
    config = changed(often, run__init_from=weights)
    for size, step in ((2, 1), (3, 3), (2, 4)):
        run_ranks(size, train_until, config, step, False)
    alone = changed(config, run__dir=str(tmp_path / "alone"))
    train(alone)
    assert losses(config.run.dir) == pytest.approx(losses(alone.run.dir), rel=1e-3)


def signalled(config):
    """Train on while rank 1 gets a signal in each step; what the run says at its end."""
    consensus.EXCHANGE_SECONDS = 0
    patch = pytest.MonkeyPatch()
    is_told = os.environ["RANK"] == "1"
    after_each_step(patch, lambda *_: is_told and os.kill(os.getpid(), signal.SIGUSR1))
    with pytest.raises(StoppedError) as error:
        train(config)
    return str(error.value)


def test_a_signal_to_one_rank_has_all_save_a_folder_and_end(config):
    config = changed(config, epochs=20)
    said, _ = run_ranks(2, signalled, config)
    [folder] = saved_steps(Path(config.run.dir, "checkpoints"))
    assert f"saved {folder} at step {int(folder.name[-8:])} of 40; run the same" in said


def test_a_killed_rank_costs_one_step_and_a_damaged_folder_another(often):
    folder = Path(often.run.dir, "checkpoints")
    ranks = [start(train_until, often, 3, True, rank=rank) for rank in job_of(2)]
    for process, _ in ranks:
        process.join()
    assert [path.name for path in saved_steps(folder)] == ["step_00000002", "step_00000003"]
    shard = min((folder / "step_00000003").glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    (folder / "step_00000004.partial").mkdir()
    run_ranks(2, train_until, often, 4, False)
    names = {path.name for path in folder.iterdir()}
    assert names == {"step_00000003", "step_00000004", "best.pt", "best.safetensors", "last.pt"}
    assert len(losses(often.run.dir)) == 8
    assert checkpoints.read_folder(folder / "step_00000003")["state"]["step"] == 3


def open_state(config, world):
    """The state of a sharded run, of a network with two classes, and its checkpoints."""
    precision = Precision("fp32", config.compute, config.optim, world.device)
    torch.manual_seed(0)
    model = build_model(config.model, 2, 32)
    shards.shard(model, precision, world)
    optimizer = build_optimizer(config.optim, model)
    shards.step_on_parts(optimizer)
    source = Source(
        torch.zeros(2, dtype=torch.long), ("ant", "bee"), torch.zeros(2, 8, 8, 3).byte()
    )
    state = TrainState(model, optimizer, precision)
    return state, checkpoints.ShardedCheckpoints(config, world, source)


def saves(config):
    """What is found after a save that ended at each moment, and after one that did not."""
    found = []
    with join_world(config.compute, 20) as world:
        state, saver = open_state(config, world)

        def save(step, place=None, name="", error=None):
            state.step = state.best_step = step
            with pytest.MonkeyPatch.context() as patch:
                if error:
                    patch.setattr(place, name, Mock(side_effect=error))
                try:
                    saver.save(state, {"loss": 0.0, "step": step})
                except (KeyboardInterrupt, FaultError, UserError) as ended:
                    found.append(str(ended))
            world.all_true(True)
            found.append(read_newest(config.run, world)["state"]["step"])

        save(1)
        full = OSError(errno.ENOSPC, "full")
        save(2, checkpoints.HuggingFaceStorageWriter, "write_data", full if world.rank else None)
        for place, name in (
            (checkpoints.HuggingFaceStorageWriter, "write_data"),
            (checkpoints.ShardedCheckpoints, "save_best"),
            (checkpoints, "gather_digests"),
            (checkpoints, "write_json"),
            (Path, "rename"),
        ):
            save(2, place, name, KeyboardInterrupt)
        save(2, checkpoints, "gather_digests", lambda *_: {"shard-of-another-machine": ""})
        save(2)
        with torch.no_grad():
            state.model.head.weight.to_local()[:1] = torch.nan if world.rank else 1.0
        save(3)
    return found


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory):
    """A run folder with the saves of two ranks, and what each found; do not change it."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    return folder, run_ranks(2, saves, tiny(folder))


def test_a_save_that_ends_early_leaves_the_one_before_it(saved_once):
    for found in saved_once[1]:
        full, machines, nan = (text for text in found if isinstance(text, str) and text)
        assert "no space left; that of step 1 is kept" in full
        assert "is not on a disk that all machines share" in machines
        assert "not finite after step 3" in nan
        assert [step for step in found if isinstance(step, int)] == [1] * 8 + [2] * 2


def test_a_folder_whose_weights_have_changed_is_left_for_the_one_before_it(saved_once, config):
    shutil.copytree(saved_once[0], config.run.dir)
    shard = max(Path(config.run.dir, "checkpoints", "step_00000002").glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert read_newest(config.run, ALONE)["state"]["step"] == 1


def test_a_disk_that_is_full_at_the_end_of_a_run_costs_no_checkpoint(
    saved_once, config, monkeypatch
):
    shutil.copytree(saved_once[0], config.run.dir)
    source = Source(torch.zeros(2).long(), ("ant", "bee"), torch.zeros(2, 8, 8, 3).byte())
    saver = checkpoints.ShardedCheckpoints(config, ALONE, source)
    saver.last, saver.kept_step = saver.folder / "step_00000002", 2
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.torch, "save", Mock(side_effect=OSError(errno.ENOSPC, "full")))
        with pytest.raises(FaultError, match="no space left; that of step 2 is kept"):
            saver.__exit__(None, None, None)
    assert read_newest(config.run, ALONE)["folder"] == saver.last
    saver.__exit__(None, None, None)
    assert read_checkpoint(saver.folder / "last.pt")["state"]["step"] == 2


def spoil_last_channel(*found):
    """Let the gradients of the last channel be inf: the last rank has all weights behind it."""
    found[2].register_hook(lambda gradient: gradient.index_fill(1, torch.tensor([47]), torch.inf))


def steps(config):
    """Whether each of three steps changes a weight here, bytes on this rank and of all, units."""
    VIT.WIDTH, VIT.DEPTH = 48, 3
    with join_world(config.compute, 20) as world:
        state, _ = open_state(config, world)
        weights, done, hook = [*state.model.parameters()], [], None
        for step in range(3):
            before = [weight.detach().to_local().clone() for weight in weights]
            if step == 1 and world.rank == 1:
                hook = state.model.patches.register_forward_hook(spoil_last_channel)
            state.precision.backward((state.model(torch.ones(2, 3, 32, 32)) - 1).square().mean())
            state.precision.step(state.optimizer)
            hook and hook.remove()
            pairs = zip(before, weights, strict=True)
            done.append(not all(torch.equal(old, new.to_local()) for old, new in pairs))
        tensors = [*weights, *chain(*(s.values() for s in state.optimizer.state.values()))]
        held = sum(local_part(tensor.detach()).nbytes for tensor in tensors)
        units = [type(unit).__name__ for unit in shards.find_units(state.model)]
        return done, held, sum(weight.nbytes for weight in weights), units


@pytest.mark.skipif(VIT is None, reason="its network is of another tool")
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_all_ranks_skip_a_step_whose_gradients_are_not_finite_on_one(config, name):
    config = changed(config, model__name="vit_s", optim__name=name)
    for done, held, whole, units in run_ranks(3, steps, config):
        assert done == [True, False, True]
        # Of two classes, one rank has no row of the last layer.
        assert held < 0.4 * whole * (2 if name == "sgd" else 3)
        assert units == ["FSDPTransformerBlock"] * 3


def saved_statistics(config):
    """A statistic of BatchNorm on this rank, which was another on each, once it is saved."""
    with join_world(config.compute, 20) as world:
        state, saver = open_state(changed(config, model__name="resnet9"), world)
        names = dict(state.model.named_buffers())
        mean = next(buffer for name, buffer in names.items() if "running_mean" in name)
        mean.fill_(5.0 + world.rank)
        state.step = state.best_step = 1
        saver.save(state, {"loss": 0.0, "step": 1})
        return mean.unique().tolist()


def test_a_checkpoint_has_the_statistics_of_one_rank_with_which_all_go_on(config):
    assert run_ranks(2, saved_statistics, config) == [[5.0]] * 2


def averaged(config):
    """The gradient here of a weight whose gradients are 256 and 1."""
    with join_world(config.compute, 20) as world:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))
        shards.shard(model, Precision("bf16", config.compute, config.optim, world.device), world)
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.full((1, 2), 1.0 if world.rank else 256.0)).sum().backward()
        return model[0].weight.grad.to_local().flatten().tolist()


def test_gradients_of_bf16_are_averaged_in_float32(config):
    assert run_ranks(2, averaged, config) == [[128.5] * 2] * 2  # bf16 has 128 or 129


def filled(config):
    """This rank's part of a weight of one row, which is filled from all of it."""
    with join_world(config.compute, 20) as world:
        model = torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False))
        shards.shard(model, Precision("fp32", config.compute, config.optim, world.device), world)
        checkpoints.copy_part(torch.full((1, 2), 7.0), model[0].weight)
        return model[0].weight.to_local().tolist()


def test_of_a_weight_that_is_too_short_for_all_ranks_the_last_has_nothing(config):
    assert run_ranks(2, filled, config) == [[[7.0, 7.0]], []]


def test_a_rank_without_images_to_evaluate_waits_for_nobody(config, tmp_path):
    for number in range(8):
        split = "train" if number < 6 else "val"
        write_photo(tmp_path / "photos" / split / "ab"[number % 2] / f"{number}.jpg", number)
    config = changed(config, data__name="folder", data__root=str(tmp_path / "photos"))
    config = changed(config, data__batch_size=6, epochs=1, optim__warmup_epochs=0)
    run_ranks(3, train, config)
    assert len(losses(config.run.dir)) == 2


MUON = [{"optim__name": "muon"}] * ("muon" in OPTIMIZERS)
REFUSED = [{"precision": "fp16"}, {"compute__compile": True}, {"compute__gradient_dtype": "bf16"}]


@pytest.mark.parametrize("knobs", [*MUON, *REFUSED])
def test_what_needs_whole_weights_is_refused(config, knobs):
    with pytest.raises(
        UserError, match=r"^--\S+ (\w+ )?does not work with --compute.parallel fsdp;"
    ):
        parallel.check_config(changed(config, **knobs))


def test_a_run_folder_from_which_nothing_could_be_read_is_refused(config):
    named = changed(config, run__dir=os.fsdecode(b"l\xe4ufe"))
    said = r"^--run.dir 'l\\udce4ufe' does not work .*; take a name in UTF-8"
    with pytest.raises(UserError, match=said):
        parallel.check_config(named)


def test_without_the_tool_its_checkpoints_are_refused(config, monkeypatch):
    monkeypatch.setattr(checkpoint_files, "find_tools", lambda _: {})
    folder = Path(config.run.dir, "checkpoints", "step_00000001")
    folder.mkdir(parents=True)
    with pytest.raises(UserError, match=r"is of sharded weights, .*: pretuned add fsdp"):
        read_newest(config.run, ALONE)


class Planted:
    """A pickle of it makes a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", [".metadata", "run.json", "shard-00001-model-00001-of-00001"])
def test_nothing_in_a_folder_is_run(config, name, saved_once, tmp_path):
    shutil.copytree(saved_once[0], config.run.dir)
    folder, trap = Path(config.run.dir, "checkpoints", "step_00000002"), tmp_path / "trap"
    path = next(folder.glob(f"{name}*"), folder / name)
    path.write_bytes(pickle.dumps(Planted(trap)))
    (folder / "digests.json").unlink()
    digests = {path.name: checkpoints.digest_of(path) for path in folder.iterdir()}
    write_json(folder / "digests.json", digests)
    is_read = name == ".metadata"  # which nothing asks for
    with nullcontext() if is_read else pytest.raises((UserError, ValueError)):
        checkpoints.read_whole(read_newest(config.run, ALONE))
    assert not trap.exists()
