"""The story of a run: build, place, compile, wrap or shard, then one flat loop over steps."""

import warnings
from contextlib import closing, nullcontext
from copy import deepcopy
from types import ModuleType

from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from .augment import Augmented, build_augment
from .checkpoint import Checkpoints, read_newest
from .config import ComputeConfig, Config
from .data import EvalData, TrainData
from .evaluate import Scores, evaluate
from .linear_probe import soften, start_from_probe
from .models import build_model, load_pretrained
from .optim import build_optimizer, build_schedule, set_lr, set_training
from .precision import Precision, settle_precision
from .preprocess import Normalize
from .runtime.consensus import AsyncConsensus
from .runtime.distributed import World, join_world
from .runtime.out_of_memory import MicroBatch
from .runtime.phases import phase
from .runtime.run_dir import open_run
from .runtime.seeding import WEIGHTS, seed_everything, seed_layers, seeded
from .runtime.signals import Signals, StoppedError
from .runtime.time_limit import TimeLimit
from .runtime.tools import need_tool
from .tasks import LossFn, build_loss, metric_of
from .tracking import RunLogger, Setup, check_setup, open_observers, watchers
from .train_state import TrainState


def train(config: Config) -> Scores:  # noqa: C901, PLR0912, PLR0915 - one story, all of it visible
    """Train one model as `config` says, and return the validation scores of its best weights.

    Killed at any moment and called again, it resumes from the last checkpoint with exactly the
    batches, pixels and random numbers that it would have had.

    Raises:
        UserError: if the config, the data or the run folder cannot be used.
        FaultError: if the run stopped early; what was saved is kept.
    """
    run = config.run
    with join_world(config.compute, run.timeout_seconds) as world, open_run(config, world):
        reproducibility = seed_everything(config.seed, config.deterministic, world.device)

        newest = world.read_once(lambda: read_newest(run, world))
        # Where to resume from, or None: what a run begins with is made again, from kept features.
        saved = newest if newest and newest["state"]["step"] else None
        pretrained = load_pretrained(
            run.init_from, config.model, world, saved, config.data.channels
        )

        # Data, and the number format that is fastest for this model on this device. Pretrained
        # weights want images normalized as those that they were trained on.
        train_data = TrainData(config, world, pretrained.mean_std)
        total_steps, steps_per_epoch = train_data.total_steps, train_data.steps_per_epoch
        config, why_precision = settle_precision(config, train_data, world, newest)
        precision = Precision(
            config.precision, config.compute, config.optim, world.device, total_steps
        )
        micro_batch = MicroBatch(config, world)
        sharding = find_sharding(config, world)  # FSDP; None: each rank has all weights
        task, mean_std = config.model.task, train_data.mean_std
        val_data = EvalData(
            train_data.data, "val", world, run, micro_batch.size, task=task, mean_std=mean_std
        )
        normalize = Normalize(train_data.source, config.data.max_size, precision, config.augment)
        augment = build_augment(config.augment, train_data, normalize, world, config.seed)
        teacher = find_teacher(config, train_data)
        kind = sharding.ShardedCheckpoints if sharding else Checkpoints
        checkpoints = kind(config, world, train_data.source, teacher.digest if teacher else "")
        if newest:  # before the minutes that the features of a probe may take
            checkpoints.check_identity(newest)

        # The model: built from the seed, filled, moved, laid out, compiled.
        model = init_model(config, train_data, normalize)
        is_trained = bool(pretrained.weights)
        has_head = pretrained.knows(model, train_data.source.classes) and config.epochs > 0
        init_note = pretrained.load_into(model, train_data.source.classes)
        del pretrained  # the model has its own copy of the weights
        model = model.to(world.device, memory_format=precision.memory_format)
        setup = Setup(config, world, train_data, val_data, model, precision)
        check_setup(setup)
        if is_trained and not has_head:  # fit the last layer to what the others make of images
            how = normalize, precision, world
            init_note += f"; {start_from_probe(config, model, train_data, *how)}"
        ema = deepcopy(model).requires_grad_(False) if config.optim.ema_decay else None
        if config.compute.compile:  # in place, so the names of the weights stay
            for compiled in filter(None, (model, ema)):
                compiled.compile()

        observers = open_observers(setup)

        # FSDP: from here on a rank has a part of each weight, and of all that belongs to it.
        if sharding:
            for sharded in filter(None, (model, ema)):
                sharding.shard(sharded, precision, world)

        optimizer = build_optimizer(config.optim, model)
        if sharding:
            sharding.step_on_parts(optimizer)
        lr_at = build_schedule(config.optim, steps_per_epoch, total_steps)
        loss_fn = build_loss(config, train_data.source, micro_batch.share)

        ema_decay, decides = config.optim.ema_decay, metric_of(config)
        state = TrainState(model, optimizer, precision, ema, ema_decay, decides)
        checkpoints.resume(state, newest)
        log = RunLogger(setup, saved, observers)
        del saved, newest  # model and optimizer have what they need of it
        log.introduce(init_note=init_note, precision_note=f"{why_precision}; {reproducibility}")
        set_training(model, config.optim)
        ddp_model = wrap_ddp(model, world, config.compute)
        evaluate_every = train_data.steps_in(run.evaluate_every_epochs)
        limit = TimeLimit(run, state.seconds)
        best, stop_early = None, state.early_stop(run.patience) or limit.message

        def is_due(every: int) -> bool:
            return state.step % every == 0 or state.step == total_steps

        def evaluate_best() -> Scores:
            whole = sharding.whole(state.best_model) if sharding else nullcontext()
            with limit.evaluation(), whole:
                return evaluate(state.best_model, val_data, normalize, precision, world)

        def judge() -> Scores:
            nonlocal best
            scores = evaluate_best()
            best = scores if state.record(scores.value(decides)) else best
            if world.is_main:
                state.decision = scores.predictions.decision(run)
            return scores

        with (
            closing(train_data),
            closing(val_data),
            Signals() as signals,
            log,
            watchers(setup, state) as tell_watchers,
            micro_batch.halve_micro_batch_on_oom(lambda: state.step),
            checkpoints,
        ):
            if is_trained:  # best.pt is never worse than what training began with
                scores, what = judge(), "before training" if has_head else "linear probe"
                log.scores(0, scores, is_last=not total_steps, what=what)
                checkpoints.save(state, log.state_dict())
                if not has_head:
                    soften(*filter(None, (model, ema)))
            consensus = AsyncConsensus(world, run.timeout_seconds)
            for loaded in train_data.batches(state.step, 0 if stop_early else total_steps):
                lr = set_lr(optimizer, lr_at(limit.place(state.step, total_steps)))
                seed_layers(config.seed, state.step, world.rank, world.device)
                batch = augment(loaded, state.step)
                loss = train_step(ddp_model, batch, loss_fn, precision, micro_batch.size, teacher)
                precision.step(optimizer)
                state.advance()

                log.step(state.step, loss, batch)
                log.was_paused |= any(tell_watchers())
                if is_due(run.log_every_steps) or is_due(steps_per_epoch):
                    log.progress(state.step, lr)
                if is_evaluated := is_due(evaluate_every) or limit.message != "":
                    scores = judge()
                    stop_early = state.early_stop(run.patience) or limit.message
                    log.scores(state.step, scores, is_last=stop_early != "")
                # All ranks learn of a signal, the clock, or that a save is due, at the same step.
                pause, spent = limit.read()
                told = signals.number or pause, state.step if checkpoints.are_old else 0, spent
                signal, overdue, spent = consensus.max(state.step, *told)
                limit.agree(spent)
                if is_evaluated or stop_early or signal or overdue > checkpoints.saved_step:
                    state.seconds = limit.seconds
                    checkpoints.save(state, log.state_dict())
                if signal and state.step < total_steps:
                    raise StoppedError(signal, checkpoints.account(state.step, total_steps))
                if stop_early:
                    break

            checkpoints.load_best(state)  # a run's result is that of the weights that it leaves
            best = best or evaluate_best()
            log.finish(best, state, stop_early, None if sharding else state.best_model, normalize)
            consensus.finish()
        return best


def init_model(config: Config, data: TrainData, normalize: Normalize) -> nn.Module:
    """The network with the random weights of the seed, on the CPU; the same on every rank.

    Some networks compute their first layer from training images: `sample`.
    """
    with seeded(WEIGHTS, config.seed):
        model = build_model(
            config.model,
            data.num_classes,
            config.data.image_size,
            sample=lambda count: normalize(data.sample(count)),
            channels=config.data.channels,
        )
        if config.compute.gradient_checkpointing:
            flag = "--compute.gradient-checkpointing"
            need_tool("recompute", "gradient-checkpointing", flag).checkpoint_blocks(model)
        if rank := config.model.lora_rank:
            need_tool("adapters", "lora", "--model.lora-rank").add_adapters(model, rank)
    return model


def train_step(  # noqa: PLR0917 - what a step needs
    model: nn.Module,
    batch: Augmented,
    loss_fn: LossFn,
    precision: Precision,
    micro_batch_size: int,
    teacher: nn.Module | None = None,
) -> Tensor:
    """Run forward and backward passes over a batch, and return its loss: () on the device.

    Args:
        model: maps (batch, channels, height, width) float32 to (batch, classes) logits.
        batch: this rank's share of it.
        loss_fn: a micro-batch's share of the loss of the batch.
        precision: autocast, and the scaling of the loss.
        micro_batch_size: images at once; the gradients of several micro-batches add up.
        teacher: maps images and labels to targets in place of the labels.
    """
    images, labels, weights = batch
    total = None  # nothing to add to where the batch is computed at once
    for start in range(0, count := len(images), micro_batch_size):
        stop = start + micro_batch_size
        part = slice(start, stop)
        # Ranks exchange gradients only with the last micro-batch.
        adds_up = stop < count and isinstance(model, DistributedDataParallel)
        with model.no_sync() if adds_up else nullcontext():
            with phase("forward"), precision.autocast():
                targets = teacher(images[part], labels[part]) if teacher else labels[part]
                counts = None if weights is None else weights[part]
                loss = loss_fn(model(images[part]), targets, counts)
            precision.backward(loss)
        total = loss.detach() if total is None else total + loss.detach()
    return total


def find_sharding(config: Config, world: World) -> ModuleType | None:
    """The tool that shards weights over all ranks, where `config` and their number ask for it.

    Raises:
        UserError: if it was deleted, or can't train as `config` says.
    """
    if config.compute.parallel == "ddp":
        return None
    sharding = need_tool("sharding", "fsdp", "--compute.parallel fsdp")
    sharding.check_config(config)
    return sharding if world.size > 1 else None


def find_teacher(config: Config, data: TrainData) -> nn.Module | None:
    """What maps images and labels to targets, where `config` names a trained model to learn from.

    Raises:
        UserError: if its tool was deleted, or that model does not know the classes of `data`.
    """
    optim = config.optim
    if not optim.teacher:
        return None
    tool = need_tool("teacher", "distill", "--optim.teacher")
    given = optim.teacher, optim.teacher_share, optim.teacher_temperature
    return tool.Teacher(*given, config.compute, data)


def wrap_ddp(model: nn.Module, world: World, compute: ComputeConfig) -> nn.Module:
    """The model as it trains: wrapped by DDP, if there are other ranks, to average gradients.

    To share BatchNorm's statistics too: `nn.SyncBatchNorm.convert_sync_batchnorm(model)`, on GPUs.
    Not with `static_graph`, which fails with `no_sync` (pytorch/pytorch#187732).
    """
    if world.size == 1 or compute.parallel == "fsdp":
        return model
    # Of 1 x 1 convolutions in channels_last, whose strides are ambiguous, and nothing is wrong.
    # https://github.com/pytorch/pytorch/issues/47163
    warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
    devices = [world.device] if world.device.type == "cuda" else None
    ddp_model = DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)
    ddp_model.broadcast_buffers = False  # before each forward pass; `evaluate` does it when needed
    if compute.gradient_dtype == "bf16":
        ddp_model.register_comm_hook(None, bf16_compress_hook)
    return ddp_model
