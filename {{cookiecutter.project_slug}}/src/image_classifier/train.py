"""The story of a run: build, place, compile, wrap or shard, then one flat loop over steps."""

from contextlib import closing, nullcontext
from copy import deepcopy

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .augment import build_augment
from .checkpoints import TrainState, load_pretrained, read_newest
from .config import Config
from .data import Augmented, EvalData, TrainData
from .evaluate import Scores, evaluate
from .extensions import functions
from .linear_probe import PROBE, soften, start_from_probe
from .models import build_model
from .optim import build_optimizer, build_schedule, set_lr, set_training
from .pace import Pace
from .parallel import open_parallel
from .precision import Precision, settle_precision
from .preprocess import Normalize
from .runtime.distributed import join_world
from .runtime.out_of_memory import MicroBatch
from .runtime.phases import phase
from .runtime.run_dir import open_run
from .runtime.seeding import WEIGHTS, seed_everything, seed_layers, seeded
from .tasks import Loss, build_loss, metric_of
from .tracking import RunLogger, Setup, check_setup, open_observers


def train(config: Config) -> Scores:  # noqa: C901, PLR0915 - one story, all of it visible
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
        source = train_data.source
        task = config.model.task
        mean_std = train_data.mean_std
        config, why_precision = settle_precision(config, train_data, world, newest)
        precision = Precision(
            config.precision, config.compute, config.optim, world.device, train_data.total_steps
        )
        parallel = open_parallel(config, world)
        micro_batch = MicroBatch(config, world)
        val_data = EvalData(
            train_data.data, "val", world, run, micro_batch.size, task=task, mean_std=mean_std
        )
        normalize = Normalize(source, config.data.max_size, precision, config.augment)
        augment = build_augment(config.augment, train_data, normalize, world, config.seed)
        loss_fn = build_loss(config, train_data, micro_batch.share)
        checkpoints = parallel.checkpoints(config, world, source, loss_fn.teacher)
        if newest:  # before the minutes that the features of a probe may take
            checkpoints.check_identity(newest)

        # The model: built from the seed, filled, moved, laid out, compiled.
        model = init_model(config, train_data, normalize)
        has_head = pretrained.knows(model, source.classes) and config.epochs > 0
        begins_as = ("before training" if has_head else PROBE) if pretrained.weights else ""
        init_note = pretrained.load_into(model, source.classes)
        del pretrained  # the model has its own copy of the weights
        model = model.to(world.device, memory_format=precision.memory_format)
        setup = Setup(config, world, train_data, val_data, model, precision)
        check_setup(setup)
        if begins_as == PROBE:  # fit the last layer to what the others make of images
            how = normalize, precision, world
            init_note += f"; {start_from_probe(config, model, train_data, *how)}"
        ema = deepcopy(model).requires_grad_(False) if config.optim.ema_decay else None
        networks = [model] if ema is None else [model, ema]
        if config.compute.compile:  # in place, so the names of the weights stay
            for network in networks:
                network.compile()
        observers = open_observers(setup)  # while every rank has all weights

        parallel.shard(networks, precision)
        optimizer = parallel.own(build_optimizer(config.optim, model))
        lr_at = build_schedule(config.optim, train_data.steps_per_epoch, train_data.total_steps)
        state = TrainState(
            model, optimizer, precision, ema, config.optim.ema_decay, metric_of(config)
        )
        log = RunLogger(setup, state, checkpoints.resume(state, newest), observers)
        del saved, newest  # model and optimizer have what they need of it
        log.introduce(init_note=init_note, precision_note=f"{why_precision}; {reproducibility}")
        pace = Pace(run, train_data, state, checkpoints)
        set_training(model, config.optim)
        ddp_model = parallel.wrap(model)
        best = None

        def evaluate_best() -> Scores:
            with pace.limit.evaluation(), parallel.whole(state.best_model):
                return evaluate(state.best_model, val_data, normalize, precision, world)

        def judge(what: str) -> Scores:
            scores = evaluate_best()
            state.record(scores.value(state.best_by))
            if world.is_main:
                state.decision = scores.predictions.decision(run)
            pace.decide()
            log.scores(state.step, scores, what, is_last=pace.stop_reason != "")
            return scores

        with (
            closing(train_data),
            closing(val_data),
            pace.signals,
            log,
            log.watched(),
            micro_batch.halve_micro_batch_on_oom(lambda: state.step),
            checkpoints,
        ):
            if begins_as:  # best.pt is never worse than what training began with
                best = judge(begins_as)
                checkpoints.save(state, log.state_dict())
            if begins_as == PROBE:
                soften(*networks)
            for loaded in train_data.batches(state.step, pace.last_step):
                lr = set_lr(optimizer, lr_at(pace.schedule_step))
                seed_layers(config.seed, state.step, world.rank, world.device)
                batch = augment(loaded, state.step)
                loss = train_step(ddp_model, batch, loss_fn, precision, micro_batch.size)
                precision.step(optimizer)
                state.advance()

                log.step(state.step, loss, batch)
                if pace.is_logged:
                    log.progress(state.step, lr)
                if pace.is_evaluated:
                    scores = judge("validation")
                    best = scores if state.is_best else best
                pace.agree()
                if pace.is_saved:
                    checkpoints.save(state, log.state_dict())
                if pace.must_stop():
                    break

            pace.consensus.finish()
            checkpoints.load_best(state)  # a run's result is that of the weights that it leaves
            best = best or evaluate_best()
            whole = state.best_model if parallel.has_all_weights else None
            log.finish(best, pace.stop_reason, whole)
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
        for change_training in functions("network", "change_training"):
            change_training(model, config)
    return model


def train_step(
    model: nn.Module,
    batch: Augmented,
    loss_fn: Loss,
    precision: Precision,
    micro_batch_size: int,
) -> Tensor:
    """Run forward and backward passes over a batch, and return its loss: () on the device.

    Args:
        model: maps (batch, channels, height, width) float32 to (batch, classes) logits.
        batch: this rank's share of it.
        loss_fn: a micro-batch's share of the loss of the batch.
        precision: autocast, and the scaling of the loss.
        micro_batch_size: images at once; the gradients of several micro-batches add up.
    """
    total = None  # nothing to add to where the batch is computed at once
    for start in range(0, count := len(batch.images), micro_batch_size):
        part = batch.part(start, stop := start + micro_batch_size)
        # Ranks exchange gradients only with the last micro-batch.
        adds_up = stop < count and isinstance(model, DistributedDataParallel)
        with model.no_sync() if adds_up else nullcontext():
            with phase("forward"), precision.autocast():
                part = loss_fn.targets(part)  # a teacher is through before activations are kept
                loss = loss_fn.of(model(part.images), part)
            precision.backward(loss)
        total = loss.detach() if total is None else total + loss.detach()
    return total
