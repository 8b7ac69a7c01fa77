"""The learning-rate range test: a short training in which the rate grows until it falls apart.

https://arxiv.org/abs/1506.01186
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn.functional import avg_pool1d

from ...augment import Normalize, build_augment
from ...config import Config, UserError
from ...data import TrainData
from ...freeze import Freeze
from ...memory import MicroBatch, split
from ...models.pretrained import open_origin
from ...network import begin_network
from ...optim import build_loss, build_optimizer, set_lr
from ...precision import Precision
from ...precision_probe import settle_precision
from ...runtime.distributed import World, join_world
from ...runtime.run_dir import open_run, write_json, write_text
from ...runtime.seeding import seed_everything, seed_layers
from ...train_state import TrainState

LOOK_EVERY = 10  # steps, between two looks at the losses: each waits for the device
SMOOTHED_SHARE = 0.05  # of the steps, that a loss is averaged over to each side
LEARNED = 0.03  # of the first loss, that it must fall by for something to be learned
EXPLODED = 1.5  # times the first loss, from which there is no way back
# Of its whole fall: how near the loss is to the lowest where it stops falling, and how much of it
# is lost where training diverges.
NEAR, LOST = 0.1, 0.5
# A longer run meets harder places than the test: parts of the two rates that it can bear.
OF_LOWEST, OF_DIVERGED = 1 / 3, 1 / 10

LEFT, RIGHT, TOP, BOTTOM = 48, 620, 16, 270  # of what the drawing encloses, in pixels


@dataclass(frozen=True)
class RangeTest:
    """What the test has found."""

    rates: list[float]  # of each step
    losses: list[float]  # of each step
    smoothed: list[float]  # the same, averaged with its neighbours
    lowest: float  # rate up to which the loss falls
    diverged: float | None  # rate from which on training falls apart; None: it does not
    suggested: float

    def words(self) -> str:
        """How the suggestion comes about."""
        end = f"it diverges from {self.diverged:.2g} on" if self.diverged else "it never diverges"
        return (
            f"the loss falls up to a learning rate of {self.lowest:.2g}, and {end}: "
            "a third of the one, or a tenth of the other if that is less"
        )


def find_lr(config: Config, command: str, folder: Path, rates: list[float]) -> RangeTest:
    """Train with each of `rates` for a step; print the one to take, and draw all in `folder`.

    Raises:
        UserError: if none of them lets the loss fall, or the config or the data can't be used.
        FaultError: if memory does not suffice.
    """
    # All layers are to learn from the first step on, and the run folder is that of the test.
    run = replace(config.run, dir=str(folder))
    config = replace(config, run=run, optim=replace(config.optim, frozen_epochs=0.0))
    with join_world(config.compute, config.run.timeout_seconds) as world, open_run(config, world):
        losses = losses_at(rates, config, world)
        finding = judge(rates, losses)
        if world.is_main:
            write_json(folder / "lr.json", vars(finding))
            write_text(folder / "lr.svg", drawing(finding))
            print(f"{finding.words()}\nwritten: {folder}/lr.svg and lr.json")
            print(f"to try: {command} --optim.lr {finding.suggested:.2g}")
    return finding


def growing(low: float, high: float, steps: int) -> list[float]:
    """Rates from `low` to `high`, each as many times the one before.

    Raises:
        UserError: if that is no range.
    """
    if not 0 < low < high or not 20 <= steps <= 100_000:
        raise UserError(
            f"--low {low:g} --high {high:g} --steps {steps}: the learning rate is to grow from "
            "more than 0, in 20 steps at the least and 100000 at the most"
        )
    return [low * (high / low) ** (step / (steps - 1)) for step in range(steps)]


def losses_at(rates: list[float], config: Config, world: World) -> list[float]:
    """The loss of each step of a training with `rates`, up to where it diverges."""
    seed_everything(config.seed, config.deterministic, world.device)
    data = TrainData(config, world)
    config, _ = settle_precision(config, data, world)
    precision = Precision(config.precision, config.compute, config.optim, world.device)
    origin = open_origin(config.run, config.model, world, data)
    micro_batch = MicroBatch(config, world)
    normalize = Normalize(data.source, config.data.image_size, precision, config.augment)
    augment = build_augment(config.augment, data, normalize, world, config.seed)
    model = begin_network(config, data, normalize, precision)
    begun = origin.fill(model, data.source.classes)
    freeze = Freeze(config, model, data.steps_per_epoch, world)
    loss_of = build_loss(config.optim, micro_batch.share, data.class_weights)
    optimizer = build_optimizer(config.optim, model)
    state = TrainState.start(replace(config.optim, ema_decay=0.0), model, optimizer, precision)
    losses = torch.zeros(len(rates), device=world.device)
    if world.is_main:
        print(f"{len(rates)} steps, learning rates {rates[0]:g} to {rates[-1]:g}; {begun}")
    try:
        with micro_batch.halved_on_failure(state, data):
            for batch in data.batches(0, len(rates)):
                learner = freeze.learner_at(state.step, optimizer)
                set_lr(optimizer, rates[state.step])
                seed_layers(config.seed, state.step, world.rank, world.device)
                for images, labels, is_last in split(augment(batch, state.step), micro_batch.size):
                    learner.require_backward_grad_sync = is_last
                    with precision.autocast():
                        loss = loss_of(learner(images), labels)
                    precision.backward(loss)
                    losses[state.step] += loss.detach()
                precision.step(optimizer)
                state.advance()
                if state.step % LOOK_EVERY == 0 or state.step == len(rates):
                    seen = (world.sum(losses[: state.step].clone()) / world.size).tolist()
                    if not smooth(seen, len(rates))[-1] < EXPLODED * seen[0]:
                        break
    finally:
        data.close()
    return seen


def smooth(losses: list[float], steps: int) -> list[float]:
    """Each loss averaged with its neighbours on both sides; what is not finite stays so."""
    reach = max(1, round(SMOOTHED_SHARE * steps))
    row = torch.tensor(losses, dtype=torch.float64)[None]
    window = 2 * reach + 1
    return avg_pool1d(row, window, stride=1, padding=reach, count_include_pad=False)[0].tolist()


def judge(rates: list[float], losses: list[float]) -> RangeTest:
    """What the losses say of the rates they were reached with.

    Raises:
        UserError: if they never fall.
    """
    smoothed = smooth(losses, len(rates))
    end = next((n for n, loss in enumerate(smoothed) if not loss < EXPLODED * smoothed[0]), None)
    low = min(smoothed[:end], default=smoothed[0])
    fall = smoothed[0] - low
    if not fall > LEARNED * smoothed[0]:
        raise UserError(
            f"no learning rate from {rates[0]:g} to {rates[len(losses) - 1]:g} lets the loss fall "
            f"({smoothed[0]:.4g} at first): set --low, --high or --steps"
        )
    lowest = next(n for n, loss in enumerate(smoothed) if loss <= low + NEAR * fall)
    after = smoothed.index(low)
    lost = [n for n in range(after, len(smoothed)) if not smoothed[n] < low + LOST * fall]
    diverged = rates[lost[0]] if lost else None
    suggested = min(OF_LOWEST * rates[lowest], OF_DIVERGED * (diverged or math.inf))
    finite = [n for n, loss in enumerate(smoothed) if math.isfinite(loss)]
    kept = ([row[n] for n in finite] for row in (rates, losses, smoothed))
    return RangeTest(*kept, rates[lowest], diverged, suggested)


def drawing(finding: RangeTest) -> str:
    """The loss over the learning rate, whose axis is logarithmic, as an SVG."""
    rates, losses = finding.rates, finding.smoothed
    low, high = min(losses), min(max(losses), EXPLODED * losses[0])
    start, decades = math.log10(rates[0]), math.log10(rates[-1] / rates[0])

    def across(rate: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * (math.log10(rate) - start) / decades, 1)

    def down(loss: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * (min(loss, high) - low) / (high - low), 1)

    parts = [f'<path d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}"/>']
    for loss in (low, (low + high) / 2, high):
        parts.append(f'<text x="{LEFT - 6}" y="{down(loss) + 4}" class="loss">{loss:.3g}</text>')
    for power in range(math.ceil(start - 1e-9), math.floor(start + decades + 1e-9) + 1):
        x = across(10.0**power)
        parts.append(f'<path d="M{x} {BOTTOM}v5"/>')
        parts.append(f'<text x="{x}" y="{BOTTOM + 20}">{10.0**power:g}</text>')
    points = " ".join(f"{across(r)},{down(loss)}" for r, loss in zip(rates, losses, strict=True))
    parts.append(f'<polyline points="{points}"/>')
    x = across(max(finding.suggested, rates[0]))
    parts.append(f'<path class="found" d="M{x} {TOP}V{BOTTOM}"/>')
    parts.append(f'<text x="{x}" y="{TOP - 4}">{finding.suggested:.2g}</text>')
    middle = (LEFT + RIGHT) // 2
    parts.append(f'<text x="{middle}" y="{BOTTOM + 38}">learning rate</text>')
    style = (
        "svg{background:#fff}text{font:12px system-ui,sans-serif;fill:#555;text-anchor:middle}"
        ".loss{text-anchor:end}path{stroke:#999;fill:none}.found{stroke:#c40;stroke-dasharray:4}"
        "polyline{fill:none;stroke:#1f66b5;stroke-width:2}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 320" role="img" '
        f'aria-label="loss over the learning rate"><style>{style}</style>{"".join(parts)}</svg>\n'
    )
