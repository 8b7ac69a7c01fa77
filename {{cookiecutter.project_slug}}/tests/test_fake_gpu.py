"""What a run asks of a GPU, on any machine: tensors that are together, and no hidden waits.

torch's FakeTensorMode has CUDA tensors that know their shape, type and device, but no numbers.
Streams and the backward pass need a driver (https://github.com/pytorch/pytorch/issues/92627), and
so does what `test_gpu.py` shows: that numbers are right, and how long they take.
"""

import math
from contextlib import contextmanager
from copy import deepcopy

import pytest
import torch
from conftest import changed, mixed, on_deep, untrained_run
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._pytree import tree_leaves

from image_classifier import augment as augment_module
from image_classifier import evaluate as evaluate_module
from image_classifier.augment import build_augment
from image_classifier.checkpoints.state import TrainState
from image_classifier.config import OPTIMIZERS
from image_classifier.data import Source
from image_classifier.data.datasets import DATASETS
from image_classifier.data.loader import EvalData, TrainData
from image_classifier.evaluate import evaluate
from image_classifier.extensions import find_tool
from image_classifier.metrics import Decision
from image_classifier.models import models_by_name
from image_classifier.optim import build_optimizer, set_training
from image_classifier.precision import Precision
from image_classifier.preprocess import Normalize
from image_classifier.runtime import seeding
from image_classifier.runtime.distributed import World
from image_classifier.tasks import build_loss
from image_classifier.train import (
    init_model,
    train_step,
)

aten = torch.ops.aten
PUTS = aten.index_put_.default, aten.index_put.default
GPU = torch.device("cuda", 0)
# By deepcopy.
pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")


class HiddenWaitError(Exception):
    """The host waits for the device."""


class ApartError(Exception):
    """An operation has tensors of the device and of the host."""


class FakeGPU(FakeTensorMode):
    """A block with CUDA tensors. Those of the CPU stay real: the host draws numbers, too."""

    def __init__(self):
        super().__init__(allow_non_fake_inputs=True)
        self.waits_left = math.inf
        self.pinned = set()  # where page-locked memory begins

    @contextmanager
    def waits(self, count):
        """A block in which the host waits for the device so many times at most."""
        self.waits_left = count
        yield
        self.waits_left = math.inf

    def wait(self, operation):
        """Count an operation for which the host waits."""
        self.waits_left -= 1
        if self.waits_left < 0:
            raise HiddenWaitError(operation)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        """Do an operation. All numbers that the host reads are 0."""
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        kinds = {tensor.device.type for tensor in tensors}
        targets = {leaf.type for leaf in leaves if isinstance(leaf, torch.device)}
        if "cuda" not in kinds | targets:
            return self.on_host(operation, args, kwargs)
        if operation is aten._local_scalar_dense.default:
            self.wait(operation)
            return torch.zeros((), dtype=args[0].dtype).item()
        if operation is aten._to_copy.default and kinds | targets == {"cpu", "cuda"}:
            return self.copy(operation, types, args, kwargs, to_host="cpu" in targets)
        if operation is aten.copy_.default and kinds == {"cpu", "cuda"}:
            return self.copy(operation, types, args, kwargs, to_host=args[0].device.type == "cpu")
        if kinds == {"cpu", "cuda"} and any(t.ndim for t in tensors if t.device.type == "cpu"):
            raise ApartError(operation)
        if operation in PUTS and any(tensor.dtype == torch.bool for tensor in tensors[1:-1]):
            self.wait(operation)  # to count what is true
        if operation is aten._fused_sgd_.default:  # has no fake kernel
            return None
        try:
            return super().__torch_dispatch__(operation, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise HiddenWaitError(operation) from error

    def on_host(self, operation, args, kwargs):
        """Do what needs no device; to lock memory needs a driver, so it is only noted."""
        if operation is aten._pin_memory.default:
            found = args[0].clone()
        elif kwargs.get("pin_memory"):
            found = operation(*args, **kwargs | {"pin_memory": False})
        else:
            return operation(*args, **kwargs)
        self.pinned.add(found.untyped_storage().data_ptr())
        return found

    def copy(self, operation, types, args, kwargs, to_host):
        """Copy from one to the other: without a wait out of page-locked memory alone."""
        is_free = kwargs.get("non_blocking") or args[2:]
        if not to_host:
            source = args[operation is aten.copy_.default].untyped_storage()
            is_free = is_free and source.data_ptr() in self.pinned
        if to_host or not is_free:
            self.wait(operation)
        if not to_host:
            return super().__torch_dispatch__(operation, types, args, kwargs)
        if operation is aten.copy_.default:
            return args[0].zero_()
        return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)


@pytest.fixture
def gpu(monkeypatch):
    """A block with CUDA tensors, and what the package asks of a driver."""
    if torch.cuda.is_available():
        pytest.skip("there is a real one")
    # Fake tensors take draws of the CPU's generator. Those of CUDA need a driver.
    generator_at = seeding.generator_at
    monkeypatch.setattr(seeding, "generator_at", lambda *key, **_: generator_at(*key))
    monkeypatch.setattr(torch.cuda, "default_generators", [torch.Generator()])
    monkeypatch.setattr(Tensor, "backward", lambda _: None)  # `trained` plants gradients
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**36, 2**36))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)
    # Or torch turns autocast and the scaling of losses off.
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    with FakeGPU() as mode:
        yield mode


def of_several(*_):
    """Sixty-four images with any number of seven labels, some unknown."""
    draws = torch.Generator().manual_seed(0)
    labels = torch.randint(-1, 2, (64, 7), dtype=torch.int8, generator=draws)
    pixels = torch.randint(256, (64, 32, 32, 3), generator=draws).byte()
    return Source(labels, tuple("abcdefg"), pixels)


@pytest.fixture
def on_labels(config, monkeypatch):
    """A run on images of several labels."""
    monkeypatch.setitem(DATASETS, "noise", of_several)
    return changed(config, data__name="noise", model__task="multi-label")


def opened(config):
    """The training images on the device, and how they are normalized and augmented."""
    world = World(GPU)
    data = TrainData(changed(config, data__where="device"), world)
    precision = Precision(config.precision, config.compute, config.optim, GPU)
    normalize = Normalize(data.source, config.data.max_size, precision, config.augment.tta)
    return data, precision, normalize, build_augment(config.augment, data, normalize, 0)


def augmented(gpu, config, start=3, stop=5):
    """The last batch of these steps, by default from two epochs; the host never waits."""
    data, _, _, augment = opened(config)
    with gpu.waits(0):
        for step, batch in enumerate(data.batches(start, stop), start=start):
            found = augment(batch, step)
    assert {tensor.device for tensor in found if tensor is not None} == {GPU}
    return found


def trained(gpu, config):
    """The state after two steps, as `train` does them; in the second the host never waits."""
    data, precision, normalize, augment = opened(config)
    model = precision.place(init_model(config, data, normalize))
    ema = deepcopy(model).requires_grad_(False) if config.optim.ema_decay else None
    optimizer = build_optimizer(config.optim, model)
    loss_fn = build_loss(config, data, data.batch_size)
    state = TrainState(model, optimizer, precision, ema, config.optim.ema_decay)
    set_training(model, config.optim)
    size = data.batch_size // config.optim.accumulate
    for loaded in data.batches(0, 2):
        seeding.seed_layers(config.seed, state.step, 0, GPU)
        batch = augment(loaded, state.step)
        loss = train_step(model, batch, loss_fn, precision, size)
        for weight in model.parameters():
            weight.grad = torch.ones_like(weight) if weight.requires_grad else None
        precision.step(optimizer)
        state.advance()
        gpu.waits_left = 0
    gpu.waits_left = math.inf
    assert loss.device == GPU
    return state


AUGMENTED = [
    {"augment__crop": "none", "augment__flip": "none"},
    {"augment__crop": "pad", "augment__flip": "random"} | mixed(cutout=4),
    {"augment__crop": "none", "augment__flip": "alternating"} | mixed(mixup=0.2),
    mixed(cutmix=0.5),
]


@pytest.mark.parametrize("knobs", AUGMENTED)
def test_augmentation_stays_on_the_device(gpu, config, knobs):
    assert augmented(gpu, changed(config, **knobs)).images.shape == (16, 3, 32, 32)


def test_a_batch_that_is_gathered_in_host_memory_is_copied_without_a_wait(gpu, config):
    data = TrainData(changed(config, data__where="host"), World(GPU))
    with gpu.waits(0):
        copies = [tensor.to(GPU, non_blocking=True) for tensor in data._gathered(0)]
    assert [len(copy) for copy in copies] == [16] * 3


def test_several_labels_are_mixed_on_the_device(gpu, on_labels):
    assert augmented(gpu, changed(on_labels, **mixed(mixup=1.0))).labels.shape == (16, 7)


def test_images_of_16_bits_stay_on_the_device(gpu, config, satellite):
    config = on_deep(config, satellite, 5, augment__crop="pad")
    assert augmented(gpu, config).images.shape == (8, 5, 32, 32)


VIT = find_tool("models", "imagenet")
LOSSES = find_tool("loss", "losses")
NETWORKS = [*sorted(models_by_name()), "resnet18", "swin_t"]
if find_tool("networks", "timm"):
    NETWORKS += ["timm/tf_efficientnet_lite0", "timm/vit_tiny_patch16_224"]


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_learn_on_the_device(gpu, config, monkeypatch, name):
    if name.startswith("timm/"):
        pytest.importorskip("timm")
    if name == "vit_s":
        monkeypatch.setattr(VIT, "DEPTH", 2)
    drops = {"model__dropout": 0.1, "model__drop_path": 0.1 * (name == "vit_s")}
    trained(gpu, changed(config, model__name=name, optim__ema_decay=0.9, **drops))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_optimizers_never_wait(gpu, config, name, precision):
    config = changed(config, optim__name=name, precision=precision)
    if precision == "bf16":
        config = changed(config, optim__clip_norm=1.0, optim__accumulate=2)
        if find_tool("groups", "layer-decay"):
            config = changed(config, optim__layer_decay=0.5)
    state = trained(gpu, config)
    assert all(norms.device == GPU for _, norms in state.precision.recent)


OPTIONS = [
    {"optim__freeze_bn": True},
    {"optim__label_smoothing": 0.1} | mixed(mixup=1.0),
    {"compute__channels_last": False},
]


@pytest.mark.parametrize("knobs", OPTIONS)
def test_a_step_stays_on_the_device_with_every_option(gpu, config, knobs):
    trained(gpu, changed(config, model__name="resnet9", **knobs))


@pytest.mark.parametrize("loss", ["entropy"] + ["focal", "asymmetric"] * (LOSSES is not None))
def test_several_labels_are_learned_on_the_device(gpu, on_labels, loss):
    knobs = {} if loss == "entropy" else {"optim__loss": loss}
    trained(gpu, changed(on_labels, **knobs))


TOOLS = {
    ("network", "head-layers"): {"model__head": "layers"},
    ("network", "lora"): {"run__init_from": "pretrained", "model__lora_rank": 2},
    ("network", "gradient-checkpointing"): {"compute__gradient_checkpointing": True},
}


@pytest.mark.parametrize("tool", TOOLS)
def test_what_tools_add_to_a_step_stays_on_the_device(gpu, config, tool):
    if find_tool(*tool) is None:
        pytest.skip("deleted")
    trained(gpu, changed(config, **TOOLS[tool]))


@pytest.mark.parametrize("mixup", [0.0, 1.0])
def test_a_teacher_stays_on_the_device(gpu, on_photos, photos, monkeypatch, mixup):
    if (tool := find_tool("loss", "distill")) is None:
        pytest.skip("deleted")
    load_model = tool.load_model

    def load(run, compute, _):  # torch.load has no numbers in the block
        with unset_fake_temporarily():
            trained_model = load_model(run, compute, World(torch.device("cpu")))
        trained_model.model.to(GPU)
        return trained_model

    monkeypatch.setattr(tool, "load_model", load)
    with unset_fake_temporarily():
        run = untrained_run(changed(on_photos, run__dir=f"{on_photos.run.dir}-teacher"), photos)
    trained(gpu, changed(on_photos, optim__teacher=run, **mixed(mixup=mixup)))


def evaluated(gpu, config):
    """The scores of random weights, of batches of 40; the host waits once."""
    train_data, precision, normalize, _ = opened(config)
    model = init_model(config, train_data, normalize).to(GPU)
    task = config.model.task
    data = EvalData(config.data, "val", World(GPU), batch_size=40, task=task)
    list(data.batches())
    with gpu.waits(1):
        return evaluate(model, data, normalize, precision)


@pytest.mark.parametrize(
    ("task", "tta"),
    [("single-label", "none"), ("single-label", "shift"), ("multi-label", "flip")],
)
def test_an_evaluation_waits_once(gpu, config, on_labels, task, tta):
    config = changed(on_labels if task == "multi-label" else config, augment__tta=tta)
    scores = evaluated(gpu, config)
    assert set(scores.names) >= set(scores.known)


@pytest.mark.parametrize("tta", ["none", "shift"])
def test_features_stay_on_the_device(gpu, config, tta):
    if (tool := find_tool("features", "linear-probe")) is None:
        pytest.skip("deleted")
    config = changed(config, augment__tta=tta)
    train_data, precision, normalize, _ = opened(config)
    model = init_model(config, train_data, normalize).to(GPU).eval()
    batch = next(iter(EvalData(config.data, "val", World(GPU), batch_size=40).batches()))
    with gpu.waits(0):
        _, features = tool.predict_features(model, batch.images, normalize, precision)
    assert features.device == GPU


def test_a_decision_is_made_on_the_device(gpu):
    probabilities, decision = torch.rand(4, 3, device=GPU), Decision(2.0, (0.5,))
    with gpu.waits(0):
        assert decision.is_sure(probabilities).device == GPU
    assert decision.has_label(probabilities).device == GPU


def read_after(patch, owner, name):
    """Let the host read a number of the device after each call of a function."""
    function = getattr(owner, name)

    def reading(*words):
        found = function(*words)
        torch.ones((), device=GPU).item()
        return found

    patch.setattr(owner, name, reading)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (TrainData, "_resident"),
        (Precision, "backward"),
        (Precision, "step"),
        (TrainState, "advance"),
    ],
)
def test_a_step_that_waits_is_found(gpu, config, monkeypatch, owner, name):
    read_after(monkeypatch, owner, name)
    with pytest.raises(HiddenWaitError):
        trained(gpu, config)


def test_an_evaluation_that_waits_for_each_batch_is_found(gpu, config, monkeypatch):
    read_after(monkeypatch, evaluate_module, "predict_logits")
    with pytest.raises(HiddenWaitError):
        evaluated(gpu, config)


MISTAKES = {
    "a copy to the host": lambda images, _: images.cpu().to(GPU),
    "a number": lambda images, _: images * images.max().item(),
    "a list": lambda images, _: images * images[0, 0, 0].tolist()[0],
    "a condition": lambda images, draws: images if (draws > 0.5).any() else -images,
    "a mask": lambda images, draws: images[draws[:, 0] < 2],
    "values at a mask": lambda images, draws: images.index_put_((draws[:, 0] < 0.5,), images[0]),
    "where it holds": lambda images, draws: images[torch.where(draws[:, 0] < 0.5)[0]],
    "a constant copied": lambda images, _: images * torch.tensor([0.5], device=GPU),
    "memory that is not page-locked": lambda images, _: (
        images + torch.zeros(images.shape).to(GPU, non_blocking=True)
    ),
    "a tensor copied": lambda images, _: images.copy_(torch.zeros(images.shape)),
    "a comparison": lambda images, _: images if torch.equal(images, images) else -images,
    "a count": lambda images, draws: images + draws.long().flatten().bincount().max(),
    "repeats": lambda images, _: images.repeat_interleave(torch.ones(16, device=GPU).long(), 0),
}
APART = {
    "a constant on the host": lambda images, _: images * torch.full((1,), 0.5),
    "images on the host": lambda images, _: images - torch.zeros(images.shape),
    "an index on the host": lambda images, _: images[torch.arange(len(images))],
    "images of the host by an index": lambda images, draws: torch.zeros(9)[draws.long()] + images,
}


@pytest.mark.parametrize("mistake", MISTAKES | APART)
def test_a_planted_mistake_is_found(gpu, config, monkeypatch, mistake):
    act, error = (MISTAKES | APART)[mistake], ApartError if mistake in APART else HiddenWaitError

    def planted(pixels, _):
        draws = torch.rand(len(pixels), 2, device=GPU)
        return act(pixels.float(), draws)

    planted.key, planted.num_draws = 9, 1
    monkeypatch.setattr(augment_module, "functions", lambda *_: [lambda *_: planted])
    with pytest.raises(error):
        augmented(gpu, config)
