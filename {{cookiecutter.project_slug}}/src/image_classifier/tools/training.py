"""A model in training as `train` builds it, for tools that make single steps."""

from copy import deepcopy

from torch import Tensor

from ..augment import build_augment
from ..checkpoints import TrainState
from ..config import Config
from ..data import Batch, TrainData
from ..errors import UserError
from ..optim import build_optimizer, set_lr, set_training
from ..parallel import Replicas, open_parallel
from ..precision import Precision
from ..preprocess import Normalize
from ..runtime.distributed import World
from ..runtime.seeding import seed_everything, seed_layers
from ..tasks import build_loss
from ..train import init_model, train_step


class Training:
    """A model, its data and its optimizer; a test compares its steps with those of `train`."""

    def __init__(self, config: Config, world: World, data: TrainData) -> None:
        """Build what `config` says; all layers learn from the first step on.

        Raises:
            UserError: if weights are to be sharded.
        """
        if not isinstance(open_parallel(config, world), Replicas):
            raise UserError("--compute.parallel is for `train`: this command has DDP alone")
        self.config = config
        self.world = world
        self.data = data
        seed_everything(config.seed, config.deterministic, world.device)
        precision = Precision(
            config.precision, config.compute, config.optim, world.device, data.total_steps
        )
        self.normalize = Normalize(data.source, config.data.max_size, precision, config.augment)
        self.augment = build_augment(config.augment, data, self.normalize, world, config.seed)
        model = init_model(config, data, self.normalize)
        model = model.to(world.device, memory_format=precision.memory_format)
        ema = deepcopy(model).requires_grad_(False) if config.optim.ema_decay else None
        if config.compute.compile:
            model.compile()
        set_training(model, config.optim)
        share = config.data.batch_size // world.size
        self.micro_batch_size = share // config.optim.accumulate
        self.loss_fn = build_loss(config, data, share)
        optimizer = build_optimizer(config.optim, model)
        self.state = TrainState(model, optimizer, precision, ema, config.optim.ema_decay)
        self.ddp_model = Replicas(config.compute, world).wrap(model)

    def train_step(self, batch: Batch, lr: float) -> Tensor:
        """Train on one batch with learning rate `lr`; returns its loss, () on the device."""
        state = self.state
        set_lr(state.optimizer, lr)
        seed_layers(self.config.seed, state.step, self.world.rank, self.world.device)
        how = self.loss_fn, state.precision, self.micro_batch_size
        loss = train_step(self.ddp_model, self.augment(batch, state.step), *how)
        state.precision.step(state.optimizer)
        state.advance()
        return loss
