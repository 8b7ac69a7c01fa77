"""The learning-rate range test: train for a few steps while the learning rate grows.

https://arxiv.org/abs/1506.01186
"""

import math
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import torch
from torch.nn.functional import avg_pool1d

from ...checkpoints import load_pretrained
from ...config import Config
from ...data import TrainData
from ...errors import UserError
from ...extensions import find_tool
from ...models import begin_at_zero
from ...runtime.distributed import World, join_world
from ...runtime.files import write_json, write_text
from ...runtime.launch import UNCLEARED
from ...runtime.out_of_memory import MicroBatch
from ...runtime.run_dir import open_run
from ...runtime.seeding import seed_everything
from ...settle import settle
from ...train import Training

CHECK_EVERY_STEPS = 10  # read the losses back so often: each time waits for the device
SMOOTHED_SHARE = 0.05  # of all steps: how far a moving average reaches to each side
MIN_FALL = 0.03  # share of the first loss that it must fall by
DIVERGED_RATIO = 1.5  # to the first loss: training stops here
# Shares of the whole fall: the loss stops falling where it is so near the lowest, and training has
# diverged where so much of the fall is lost again.
NEAR_LOWEST, FALL_LOST = 0.1, 0.5


@dataclass(frozen=True)
class RangeTest:
    """The result of a range test; all losses are finite."""

    lrs: list[float]  # of each step
    losses: list[float]  # of each step
    smoothed: list[float]  # the losses' moving average
    lr_best: float  # where the loss stops falling
    lr_diverge: float | None  # where training diverges; None: it does not
    suggested: float


def find_lr(config: Config, command: str, lrs: list[float]) -> RangeTest:
    """Run a range test over `lrs`, and write `lr.json` to the run folder.

    With the tool `report` also `lr.html`, a chart.
    Prints `command`, which trains `config`, with the suggested learning rate.

    Raises:
        UserError: if no learning rate lets the loss fall, or the config or the data is unusable.
        FaultError: if memory does not suffice.
    """
    config = replace(config, optim=replace(config.optim, ema_decay=0.0))  # no average is needed
    folder = Path(config.run.dir)
    with join_world(config.compute, config.run.timeout_seconds) as world, open_run(config, world):
        if world.local_rank == 0:  # a restart out of memory is no fresh one
            (folder / UNCLEARED).unlink(missing_ok=True)
        result = analyze(lrs, losses_at(lrs, config, world))
        if world.is_main:
            write_json(folder / "lr.json", vars(result))
            charts = find_tool("charts", "report")
            if charts is not None:
                write_text(folder / "lr.html", page(result, charts))
            diverge = f"{result.lr_diverge:.2g}" if result.lr_diverge else "not reached"
            print(f"lr_best (the loss falls up to here) {result.lr_best:.2g}, lr_diverge {diverge}")
            print("The suggestion is the smaller of lr_best / 3 and lr_diverge / 10.")
            print(f"written: {folder}/{'lr.html and ' if charts else ''}lr.json")
            print(f"try: {command} --optim.lr {result.suggested:.2g}")
    return result


def geometric_lrs(low: float, high: float, steps: int) -> list[float]:
    """Learning rates from `low` to `high`, evenly spaced on a logarithmic scale.

    Raises:
        UserError: if the range or the number of steps is unusable.
    """
    if not 0 < low < high or not 20 <= steps <= 100_000:
        raise UserError(
            f"--low {low:g} --high {high:g} --steps {steps}: needs 0 < low < high "
            "and 20 to 100000 steps"
        )
    return [low * (high / low) ** (step / (steps - 1)) for step in range(steps)]


def losses_at(lrs: list[float], config: Config, world: World) -> list[float]:
    """Train one step with each of `lrs`, and return the losses up to where it diverges."""
    seed_everything(config.seed, config.deterministic, world.device)
    pretrained = load_pretrained(config, world)
    data = TrainData(config, world, pretrained.mean_std)
    config, _ = settle(config, data, world)
    micro_batch = MicroBatch(config, world)
    training = Training(config, world, data, micro_batch.share)
    model = training.model
    classes = data.source.classes
    is_new = bool(pretrained.weights) and not pretrained.knows(model, classes)
    init_note = pretrained.load_into(model, classes)
    if is_new:  # not fitted, from where the loss would hardly fall
        begin_at_zero(model)
    training.begin()
    losses = torch.zeros(len(lrs), device=world.device)
    if world.is_main:
        print(f"{len(lrs)} steps, learning rates {lrs[0]:g} to {lrs[-1]:g}; {init_note}")
    halving = micro_batch.halve_micro_batch_on_oom(lambda: training.state.step)
    with closing(data), halving:
        for step, batch in enumerate(data.batches(0, len(lrs))):
            _, losses[step] = training.step(batch, lrs[step], micro_batch.size)
            done = step + 1
            if done % CHECK_EVERY_STEPS == 0 or done == len(lrs):
                seen = (world.all_reduce_sum(losses[:done].clone()) / world.size).tolist()
                if not smooth(seen, len(lrs))[-1] < DIVERGED_RATIO * seen[0]:
                    break
    if world.local_rank == 0:
        micro_batch.path.unlink(missing_ok=True)  # the next test may be of another model
    return seen


def smooth(losses: list[float], num_steps: int) -> list[float]:
    """The centered moving average of `losses`; inf and nan spread to their neighbors."""
    reach = max(1, round(SMOOTHED_SHARE * num_steps))
    row = torch.tensor(losses, dtype=torch.float64)[None]
    window = 2 * reach + 1
    return avg_pool1d(row, window, stride=1, padding=reach, count_include_pad=False)[0].tolist()


def analyze(lrs: list[float], losses: list[float]) -> RangeTest:
    """Find where the loss stops falling and where it diverges."""
    smoothed = smooth(losses, len(lrs))
    limit = DIVERGED_RATIO * smoothed[0]
    end = next((n for n, loss in enumerate(smoothed) if not loss < limit), None)
    lowest = min(smoothed[:end], default=smoothed[0])
    fall = smoothed[0] - lowest
    if not fall > MIN_FALL * smoothed[0]:
        raise UserError(
            f"no learning rate from {lrs[0]:g} to {lrs[len(losses) - 1]:g} lets the loss fall "
            f"({smoothed[0]:.4g} at first): set --low, --high or --steps"
        )
    best = next(n for n, loss in enumerate(smoothed) if loss <= lowest + NEAR_LOWEST * fall)
    after = range(smoothed.index(lowest), len(smoothed))
    lost = (n for n in after if not smoothed[n] < lowest + FALL_LOST * fall)
    lr_diverge = next((lrs[n] for n in lost), None)
    # A full run meets harder places than this test.
    suggested = min(lrs[best] / 3, (lr_diverge or math.inf) / 10)
    finite = [n for n, loss in enumerate(smoothed) if math.isfinite(loss)]
    kept = ([row[n] for n in finite] for row in (lrs, losses, smoothed))
    return RangeTest(*kept, lrs[best], lr_diverge, suggested)


def page(result: RangeTest, charts: ModuleType) -> str:
    """The smoothed loss over the learning rate, as an HTML page."""
    limit = DIVERGED_RATIO * result.losses[0]
    points = zip(result.lrs, (min(loss, limit) for loss in result.smoothed), strict=True)
    chart = charts.line_chart("loss", {"loss": [*points]}, x_label="learning rate", is_log=True)
    note = f"<p>suggested learning rate: {result.suggested:.2g}</p>"
    return charts.PAGE.substitute(title="Learning-rate range test", body=chart + note)
