"""The story of a run, from a config to scores."""

from collections.abc import Iterator

from torch import Tensor

from .augment import Normalize, build_augment
from .checkpoint import Checkpoints, init_from
from .config import Config
from .distributed import join_world
from .evaluate import Scores, evaluate
from .loader import EvalData, TrainData
from .mistakes import Start, find_mistakes
from .models import build_model
from .optim import build_loss, build_optimizer, build_schedule, set_lr
from .precision import Precision
from .profiling import profiler
from .report import Report
from .run import open_run
from .seeding import WEIGHTS, seed_everything, seed_layers, seeded
from .state import TrainState


def train(config: Config) -> Scores:
    """Train one model as `config` says, and return how good it is at the end.

    Killed at any moment and called again, it goes on from the last checkpoint with the very
    batches, pixels and random numbers that it would have seen.

    Raises:
        UserError: if the config, the data or the run folder can't be used.
    """
    with join_world(config.compute) as world:
        open_run(config, world)
        promise = seed_everything(config.seed, config.deterministic, world.device)
        precision = Precision(config.precision, config.compute, config.optim, world.device)

        train_data = TrainData(config, world)
        val_data = EvalData(config.data, "val", world)
        normalize = Normalize(train_data.source, config.data.image_size, precision, config.augment)
        augment = build_augment(config.augment, train_data, normalize, world, config.seed)
        steps_per_epoch, total_steps = (
            train_data.steps_per_epoch,
            train_data.steps_in(config.epochs),
        )
        evaluate_every = train_data.steps_in(config.run.evaluate_every_epochs)
        save_every = config.run.save_every_steps or evaluate_every

        with seeded(WEIGHTS, config.seed):
            model = build_model(
                config.model,
                train_data.num_classes,
                config.data.image_size,
                sample=lambda count: normalize(train_data.sample(count)),
            )
        origin = init_from(config.run, model)
        model = precision.place(model)
        loss_of = build_loss(config.optim)
        optimizer = build_optimizer(config.optim, model)
        lr_at = build_schedule(config.optim, steps_per_epoch, total_steps)
        doubts = find_mistakes(Start(config, model, train_data, val_data, lr_at, total_steps))

        state = TrainState.start(config.optim, model, optimizer, precision)
        checkpoints = Checkpoints(config, world, train_data.source)
        saved = checkpoints.resume(state)
        report = Report(config, world, train_data, total_steps, saved)
        report.introduce(val_data, model, precision, origin, promise, *doubts)
        learner = world.parallelize(model, config.compute)  # the same weights, shared gradients
        scores = None

        with report, checkpoints, profiler(config, world) as profile_step:
            for batch in report.watched(train_data.batches(state.step, total_steps)):
                lr = set_lr(optimizer, lr_at(state.step))
                seed_layers(config.seed, state.step, world.rank, world.device)
                parts = split(augment(batch, state.step), config.optim.accumulate)
                for images, labels, is_last in parts:
                    # Ranks exchange gradients with the last part only. This is the variable that
                    # DDP's no_sync() toggles; a model that is not wrapped takes no notice of it.
                    learner.require_backward_grad_sync = is_last
                    with precision.autocast():
                        loss = loss_of(learner(images), labels)
                    precision.backward(loss)
                    report.count(loss)
                precision.step(optimizer)
                state.advance()

                profile_step()
                if is_due(state.step, total_steps, config.run.log_every_steps, steps_per_epoch):
                    report.write_progress(state.step, lr)
                if is_due(state.step, total_steps, evaluate_every):
                    scores = evaluate(state.best_model, val_data, normalize, precision, world)
                    report.write_scores(state.step, scores.metrics())
                    state.note(scores.top1)
                if is_due(state.step, total_steps, save_every) or state.is_best:
                    checkpoints.save(state, report.state_dict())
                    report.restart_clock(state.step)

            scores = scores or evaluate(state.best_model, val_data, normalize, precision, world)
            report.finish(scores.metrics(), scores.confusion, train_data.source.classes)
        return scores


def split(batch: tuple[Tensor, Tensor], parts: int) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Images and labels of a batch in equal `parts`, and whether it is the last."""
    if parts == 1:
        yield *batch, True
        return
    chunks = zip(*(tensor.chunk(parts) for tensor in batch), strict=True)
    for number, (images, labels) in enumerate(chunks, start=1):
        yield images, labels, number == parts


def is_due(step: int, total_steps: int, *every: int) -> bool:
    """Whether what is done every so many steps, and at the end, is due after `step`."""
    return step == total_steps or any(step % steps == 0 for steps in every)
