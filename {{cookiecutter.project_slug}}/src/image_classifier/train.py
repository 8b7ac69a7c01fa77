"""The story of a run, from a config to scores."""

from contextlib import closing

from .augment import Normalize, build_augment
from .checkpoint import Checkpoints
from .config import Config
from .data import EvalData, TrainData
from .evaluate import Scores, evaluate
from .freeze import Freeze
from .guard import Guard
from .memory import MicroBatch, split
from .models.pretrained import open_origin
from .network import begin_network
from .optim import build_loss, build_optimizer, build_schedule, set_lr
from .plan import Plan
from .precision import Precision
from .precision_probe import settle_precision
from .runtime.distributed import join_world
from .runtime.profiler import profiler
from .runtime.run_dir import open_run
from .runtime.seeding import seed_everything, seed_layers
from .runtime.signals import Signals, StoppedError
from .tracking.logger import Report
from .tracking.sanity_checks import Start, find_mistakes
from .train_state import TrainState


def train(config: Config) -> Scores:
    """Train one model as `config` says, and return how good it is at the end.

    Killed at any moment and called again, it goes on from the last checkpoint with the very
    batches, pixels and random numbers that it would have seen.

    Raises:
        UserError: if the config, the data or the run folder can't be used.
        FaultError: if it had to end before its end; what was saved is kept.
    """
    with (
        join_world(config.compute, config.run.timeout_seconds) as world,
        open_run(config, world),
    ):
        promise = seed_everything(config.seed, config.deterministic, world.device)

        train_data = TrainData(config, world)
        config, why = settle_precision(config, train_data, world)
        precision = Precision(config.precision, config.compute, config.optim, world.device)
        micro_batch = MicroBatch(config, world)  # all that is computed with at once
        val_data = EvalData(config.data, "val", world, config.run, micro_batch.size)
        origin = open_origin(config.run, config.model, world, train_data, val_data)
        normalize = Normalize(train_data.source, config.data.max_size, precision, config.augment)
        plan = Plan(config.run, train_data)

        model = begin_network(config, train_data, normalize, precision)
        begun = origin.fill(model, train_data.source.classes)
        freeze = Freeze(config, model, plan.steps_per_epoch, world)
        loss_of = build_loss(config.optim, micro_batch.share, train_data.class_weights)
        optimizer = build_optimizer(config.optim, model)
        lr_at = build_schedule(config.optim, plan.steps_per_epoch, plan.total_steps)
        augment = build_augment(config.augment, train_data, normalize, world, config.seed)
        warnings = find_mistakes(
            Start(config, model, train_data, val_data, lr_at, plan.total_steps)
        )

        state = TrainState.start(config.optim, model, optimizer, precision, config.run.patience)
        checkpoints = Checkpoints(config, world, train_data.source)
        report = Report(config, world, train_data, plan.total_steps, checkpoints.resume(state))
        report.introduce(
            val_data,
            model,
            precision,
            frozen=freeze.weights,
            begun=begun,
            promise=f"{why}; {promise}",
            warnings=warnings,
        )
        augment = report.page.look_on(augment, normalize.pixels)
        scores = None

        with (
            closing(train_data),
            closing(val_data),
            Signals() as signals,
            report,
            Guard(config.run, state, train_data, lr_at, micro_batch, signals, checkpoints) as guard,
            checkpoints,
            profiler(config, world) as profiled,
        ):
            batches = state.until_stalled(train_data.batches(state.step, plan.total_steps))
            for batch in profiled(report.watched(batches)):
                learner = freeze.learner_at(state.step, optimizer)  # shares gradients with others
                lr = set_lr(optimizer, lr_at(state.step))
                seed_layers(config.seed, state.step, world.rank, world.device)
                for images, labels, is_last in split(augment(batch, state.step), micro_batch.size):
                    # Ranks exchange gradients with the last part only. This is the variable that
                    # DDP's no_sync() toggles; a model that is not wrapped takes no notice of it.
                    learner.require_backward_grad_sync = is_last
                    with precision.autocast():
                        loss = loss_of(learner(images), labels)
                    precision.backward(loss)
                    report.count(loss)
                is_spoiled = precision.step(optimizer)
                state.advance()
                signal, is_save_due = guard.look(is_spoiled)

                if plan.logs_after(state.step):
                    report.write_progress(state.step, lr, guard.metrics)
                if plan.evaluates_after(state.step):
                    scores = evaluate(state.best_model, val_data, normalize, precision, world)
                    report.write_scores(state.step, scores.metrics(), scores.answers)
                    state.note(scores.top1)
                if plan.saves_after(state.step) or state.is_to_keep or is_save_due:
                    checkpoints.save(state, report.state_dict())
                if signal and state.step < plan.total_steps:
                    raise StoppedError(signal, checkpoints.account(state.step, plan.total_steps))

            scores = scores or evaluate(state.best_model, val_data, normalize, precision, world)
            report.finish(scores.metrics(), scores.answers, state.end)
        return scores
