"""The story of a run: build, fill, begin, then one flat loop over steps."""

from contextlib import closing, nullcontext
from copy import deepcopy

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .augment import build_augment
from .checkpoints import PretrainedWeights, TrainState, load_pretrained, read_newest
from .config import Config
from .data import Augmented, Batch, TrainData
from .evaluate import Scores, evaluate
from .extensions import function, functions
from .models import begin_at_zero, build_model
from .optim import build_optimizer, build_schedule, set_lr, set_training
from .pace import Pace
from .parallel import choose_buckets, open_parallel
from .precision import Precision
from .preprocess import Normalize
from .runtime.distributed import World, join_world
from .runtime.out_of_memory import MicroBatch
from .runtime.phases import phase
from .runtime.run_dir import open_run
from .runtime.seeding import WEIGHTS, seed_everything, seed_layers, seeded
from .settle import settle
from .tasks import Loss, build_loss
from .tracking import RunLogger, Setup, check_setup, open_observers

PROBE = "linear probe"  # what fine-tuning begins with, where a tool fits one


def train(config: Config) -> Scores:  # noqa: PLR0915 - one story, all of it visible
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
        saved = world.read_once(lambda: read_newest(run, world))  # the checkpoint to resume from
        pretrained = load_pretrained(config, world, saved)

        # Pretrained weights want images normalized as those that they were trained on.
        train_data = TrainData(config, world, pretrained.mean_std)
        config, why_precision = settle(config, train_data, world, saved)  # neither is `auto` now
        micro_batch = MicroBatch(config, world)
        val_data = train_data.open_split("val", micro_batch.size)

        # The model with the weights of the seed, then with pretrained ones and a fitted last layer.
        training = Training(config, world, train_data, micro_batch.share)
        parallel = training.parallel
        teacher = training.loss_fn.teacher
        checkpoints = parallel.checkpoints(config, world, train_data.source, teacher)
        checkpoints.check_identity(saved)
        how = training.precision, training.normalize
        setup = Setup(config, world, train_data, val_data, training.model, *how)
        check_setup(setup)
        init_note, begins_as = start_from(pretrained, setup)
        del pretrained  # the model has its own copy of the weights
        observers = open_observers(setup)  # while every rank has all weights

        training.begin()  # averaged, compiled, sharded or wrapped, with an optimizer
        state = training.state
        lr_at = build_schedule(config.optim, train_data.steps_per_epoch, train_data.total_steps)
        log = RunLogger(setup, state, checkpoints.resume(state, saved), observers)
        del saved  # model and optimizer have what they need of it
        log.introduce(init_note, f"{why_precision}; {reproducibility}")
        pace = Pace(run, train_data, state, checkpoints)
        best = None

        def evaluate_best() -> Scores:
            with pace.limit.evaluation(), parallel.whole(state.best_model):
                return evaluate(state.best_model, val_data, training.normalize, training.precision)

        def judge(what: str) -> Scores:
            scores = evaluate_best()
            state.record(scores.value(state.best_by), scores.slack(state.best_by))
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
            if begins_as:  # best.pt is never more than an image worse than what training began with
                best = judge(begins_as)
                checkpoints.save(state, log.state_dict())
            if begins_as == PROBE and pace.last_step:
                function("head", "soften_head")(*training.networks)
            for loaded in train_data.batches(state.step, pace.last_step):
                lr = lr_at(pace.schedule_step)
                batch, loss = training.step(loaded, lr, micro_batch.size)

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


class Training:
    """A model in training, and all that its steps need; tools build it as `train` does."""

    def __init__(self, config: Config, world: World, data: TrainData, batch_size: int) -> None:
        """Build what `config` says, as `settle` left it, for a rank's `batch_size`.

        The model has the random weights of the seed.

        Raises:
            UserError: if there is no such model, or it can't be trained so.
        """
        self.config = config
        self.world = world
        self.precision = Precision(
            config.precision, config.compute, config.optim, world.device, data.total_steps
        )
        self.parallel = open_parallel(config, world)
        source = data.source
        self.normalize = Normalize(source, config.data.max_size, self.precision, config.augment.tta)
        self.augment = build_augment(config.augment, data, self.normalize, config.seed)
        self.loss_fn = build_loss(config, data, batch_size)
        self.model = self.precision.place(init_model(config, data, self.normalize))

    def begin(self) -> None:
        """Begin with the weights that the model has now: average, compile, shard or wrap."""
        optim = self.config.optim
        ema = deepcopy(self.model).requires_grad_(False) if optim.ema_decay else None
        self.networks = [self.model] if ema is None else [self.model, ema]
        if self.config.compute.compile:  # in place, so the names of the weights stay
            for network in self.networks:
                network.compile(dynamic=False)  # for each of a few sizes of images
        self.parallel.shard(self.networks, self.precision)
        optimizer = self.parallel.own(build_optimizer(optim, self.model))
        self.state = TrainState(
            self.model, optimizer, self.precision, ema, optim.ema_decay, self.config.run.best_by
        )
        set_training(self.model, optim)
        self.ddp_model = self.parallel.wrap(self.model)
        is_ddp = isinstance(self.ddp_model, DistributedDataParallel)
        self.has_buckets = not is_ddp or self.world.size < 3  # two add up in either order

    def step(self, loaded: Batch, lr: float, micro_batch_size: int) -> tuple[Augmented, Tensor]:
        """Train on one batch; returns it as the model saw it, and its loss: () on the device."""
        state = self.state
        how = self.loss_fn, self.precision, micro_batch_size
        set_lr(state.optimizer, lr)
        if not self.has_buckets:
            batch = self.augment(loaded, state.step)
            choose_buckets(self.ddp_model, lambda: train_step(self.ddp_model, batch, *how))
            self.has_buckets = True
        seed_layers(self.config.seed, state.step, self.world.rank, self.world.device)
        batch = self.augment(loaded, state.step)
        loss = train_step(self.ddp_model, batch, *how)
        state.precision.step(state.optimizer)
        state.advance()
        return batch, loss


def start_from(pretrained: PretrainedWeights, setup: Setup) -> tuple[str, str]:
    """Load pretrained weights; a last layer of other classes is zero, or as a tool fits it.

    Returns a note for the log, and what is evaluated before training: nothing of random weights.
    """
    model = setup.model
    classes = setup.train_data.source.classes
    has_head = pretrained.knows(model, classes) and setup.config.epochs > 0
    note = pretrained.load_into(model, classes)
    if not pretrained.weights:
        return note, ""
    if has_head:
        return note, "before training"
    begin_at_zero(model)
    fit_head = function("head", "fit_head")
    if fit_head is None:
        return note, "last layer at zero"
    told, is_fitted = fit_head(setup)
    return f"{note}; {told}", PROBE if is_fitted else "before training"


def init_model(config: Config, data: TrainData, normalize: Normalize) -> nn.Module:
    """The network with the random weights of the seed, on the CPU; the same on every rank."""
    images = config.data
    with seeded(WEIGHTS, config.seed):
        model = build_model(config.model, data.num_classes, images.image_size, images.channels)
        for change_training in functions("network", "change_training"):
            change_training(model, config, data, normalize)
    return model


def train_step(
    model: nn.Module, batch: Augmented, loss_fn: Loss, precision: Precision, micro_batch_size: int
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
