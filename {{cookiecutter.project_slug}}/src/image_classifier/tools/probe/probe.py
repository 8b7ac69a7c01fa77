"""A new last layer for a frozen network: features once, then the best head of a small grid.

How good are these weights for these images? The run folder is that of a run that made no step.
"""

from contextlib import closing
from dataclasses import replace

import torch
from torch import Tensor, nn

from ...checkpoint import Checkpoints, read_newest
from ...config import Config
from ...data import LEFT_OUT, EvalData, TrainData
from ...errors import UserError
from ...evaluate import Scores, evaluate
from ...models import PretrainedWeights, build_model, find_head, load_pretrained
from ...optim import build_optimizer
from ...precision import Precision, settle_precision
from ...preprocess import Normalize
from ...runtime.console import some
from ...runtime.distributed import World, join_world
from ...runtime.run_dir import clear_run, open_run
from ...runtime.seeding import WEIGHTS, seed_everything, seeded
from ...tasks import metric_of
from ...tracking import RunLogger, Setup, blank_logits, check_setup
from ...train_state import TrainState
from .features import Features, compute_features
from .heads import (
    GRIDS,
    LINEAR,
    NEIGHBORS,
    Head,
    best_of,
    cross_validate,
    few_threads,
    fitted,
    linear_layer,
)

ROUNDING = 1e-3  # of logits, relative to the largest


def probe(config: Config) -> Scores:
    """Fit heads to what `config`'s network makes of the images; the scores of the linear head.

    Writes a run folder, whose checkpoint is the network with that head.

    Raises:
        UserError: if the config, the data, the weights or the run folder cannot be used.
        FaultError: if memory does not suffice, or a data worker was killed.
    """
    run = config.run
    check_config(config)
    with join_world(config.compute, run.timeout_seconds) as world, open_run(config, world):
        check_run(config, world)
        reproducibility = seed_everything(config.seed, config.deterministic, world.device)
        channels = config.data.channels
        pretrained = load_pretrained(run.init_from, config.model, world, channels=channels)
        data = open_images(config, world, pretrained)
        if data.source.is_multi_label:
            raise UserError("probe needs one label for each image; these may have several")
        config, why_precision = settle_precision(config, data, world)
        precision = Precision(config.precision, config.compute, config.optim, world.device)
        train_data, val_data = (
            EvalData(config.data, name, world, run, mean_std=data.mean_std)
            for name in ("train", "val")
        )
        normalize = Normalize(data.source, config.data.max_size, precision, config.augment)
        with seeded(WEIGHTS, config.seed):
            size = config.data.image_size
            model = build_model(config.model, data.num_classes, size, channels=channels)
        init_note = pretrained.load_into(model, data.source.classes)
        model = model.to(world.device, memory_format=precision.memory_format).eval()
        setup = Setup(config, world, data, val_data, model, precision, unfreeze_step=0)
        check_setup(setup)
        layer = linear_head(config, model)

        checkpoints = Checkpoints(config, world, data.source)
        clear_run(checkpoints.folder.parent, world)
        log = RunLogger(setup, None, [])
        lines = [
            f"{len(train_data):,} training and {len(val_data):,} validation images of "
            f"{data.num_classes} classes",
            *train_data.source.notes,
            *val_data.source.notes,
            f"{config.model.name}: {init_note}",
            f"{precision.name}: {why_precision}; {reproducibility}",
        ]
        log.say("\n".join(lines))
        with closing(data), closing(train_data), closing(val_data), log, checkpoints:
            network = (model, normalize, precision)
            train, val = (
                compute_features(config, part, *network) for part in (train_data, val_data)
            )
            width = train.values.shape[1]
            log.say(f"{width:,} features of each image: {train.note}; validation: {val.note}")
            heads, best, knn_top1 = fit_heads(layer, train, val, config.seed, data.weights)
            val = replace(val, scale=rescale(model, layer, config))
            scores = evaluate(layer, val, val, precision, world)
            top1 = {best[LINEAR]: scores.value("top1"), best[NEIGHBORS]: knn_top1}
            log.say(table(heads, top1))
            log.write(0, scores.metrics(*scores.names) | metrics_of(top1))
            message = f"probe: only the last layer was fitted: {best[LINEAR]}"
            log.warnings.append(message)  # for the report page
            optimizer, decides = build_optimizer(config.optim, model), metric_of(config)
            state = TrainState(model, optimizer, precision, best_by=decides)
            state.record(scores.value(decides))
            state.decision = scores.predictions.decision(run)
            checkpoints.save(state, log.state_dict())
            log.finish(scores, message, model, normalize)
        return scores


def check_config(config: Config) -> None:
    """Raise `UserError` for options that no probe can have."""
    if not config.run.init_from:
        raise UserError("probe needs trained weights: --run.init-from FILE, or pretrained")
    if config.model.lora_rank:
        raise UserError("probe trains nothing but the last layer: leave out --model.lora-rank")


def check_run(config: Config, world: World) -> None:
    """Raise `UserError` if there are several ranks, or the run folder holds a run that trained."""
    if world.size > 1 or config.run.processes not in ("auto", 1):
        raise UserError("probe is one process: start it without torchrun or --run.processes")
    saved = read_newest(config.run, world)
    if saved and saved["state"]["step"]:
        raise UserError(
            f"{config.run.dir!a} holds a run that has trained: take another --run.dir, or delete "
            "that run with --run.fresh"
        )


def linear_head(config: Config, model: nn.Module) -> nn.Linear:
    """The last layer of the network; UserError if it is not linear."""
    name, layer = find_head(model)
    if not isinstance(layer, nn.Linear):
        raise UserError(f"{config.model.name} ends in {name!r}, which is no linear layer")
    return layer


def open_images(config: Config, world: World, pretrained: PretrainedWeights) -> TrainData:
    """The training images, of which nothing is read but what is measured to normalize them."""
    unread = replace(config.data, where="stream", workers=0)
    return TrainData(replace(config, data=unread), world, pretrained.mean_std)


def fit_heads(
    layer: nn.Linear, train: Features, val: Features, seed: int, weights: Tensor | None
) -> tuple[list[Head], dict[str, Head], float]:
    """Load the best linear head into `layer`; `weights` are those of the training images.

    Returns:
        All heads, the best of each kind, and the top-1 of the nearest neighbors on `val`.

    Raises:
        UserError: if a class has no training image.
    """
    counted = train.labels != LEFT_OUT
    values, labels, classes = train.values[counted], train.labels[counted], train.source.classes
    sizes = labels.bincount(minlength=len(classes)).tolist()
    if missing := tuple(name for name, size in zip(classes, sizes, strict=True) if not size):
        raise UserError(
            f"probe needs training images of each class; there is none of {some(missing)}"
        )
    has_bias, weights = layer.bias is not None, None if weights is None else weights[counted]
    with few_threads(values):
        heads = cross_validate(values, labels, has_bias, seed, weights)
        best = {kind: best_of(heads, kind) for kind in GRIDS}
        weight, bias = linear_layer(fitted(best[LINEAR], values, labels, has_bias, weights))
        neighbors = fitted(best[NEIGHBORS], values, labels, has_bias)
        voted = neighbors.predict(val.values.double().numpy())
    layer.weight.data.copy_(weight)
    if has_bias:
        layer.bias.data.copy_(bias)
    is_right = (torch.from_numpy(voted) == val.labels)[val.labels != LEFT_OUT]
    return heads, best, float(is_right.double().mean())


def table(heads: list[Head], top1: dict[Head, float]) -> str:
    """The scores of all heads; `top1`, on the validation images, of those that were chosen."""
    lines = [f"  {'head':<20} {'cross-validated':>15} {'loss':>8} {'validation':>11}"]
    for head in heads:
        chosen = f"{top1[head]:11.2%}" if head in top1 else ""
        lines.append(f"  {head!s:<20} {head.top1:15.2%} {head.loss:8.4f} {chosen}".rstrip())
    return "\n".join(["", *lines, ""])


def metrics_of(top1: dict[Head, float]) -> dict[str, float]:
    """What to log of the chosen heads, and of their top-1 on the validation images."""
    metrics = {}
    for head, score in top1.items():
        prefix, knob = f"probe/{head.kind}", GRIDS[head.kind][0]
        metrics[f"{prefix}_top1"] = score
        metrics[f"{prefix}_cross_validated_top1"] = head.top1
        metrics[f"{prefix}_{knob}"] = head.value
    return metrics


def rescale(model: nn.Module, layer: nn.Linear, config: Config) -> float:
    """Divide `layer` by what the network multiplies its outputs by, and return that number.

    Raises:
        UserError: if the network does anything else with them.
    """
    outputs: list[Tensor] = []
    hook = layer.register_forward_hook(lambda *call: outputs.append(call[2]))
    logits = blank_logits(model, config.data.eval_size, config.data.channels)
    hook.remove()
    (output,) = outputs
    scale = float((logits * output).sum() / output.square().sum())
    if not torch.allclose(logits, scale * output, atol=ROUNDING * float(logits.abs().max())):
        raise UserError(
            f"{config.model.name} computes on after its last layer, so that no other fits: take "
            "another network"
        )
    for weight in layer.parameters():
        weight.data.div_(scale)
    return scale
