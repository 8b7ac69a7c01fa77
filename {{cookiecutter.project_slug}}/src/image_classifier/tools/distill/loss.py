"""Knowledge distillation: a trained model, the teacher, gives a part of the targets.

https://arxiv.org/abs/1503.02531. It is in evaluation mode and sees the pixels that the student
sees, which made the difference in https://arxiv.org/abs/2106.05237. Cross entropy is linear in the
targets, so those of labels and teacher are mixed, and the loss stays as it is.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from ...checkpoints import load_model
from ...config import ComputeConfig, Config
from ...data import LEFT_OUT, Augmented, TrainData
from ...errors import UserError
from ...runtime.console import some
from ...tasks import TASKS, Loss


def change_loss(loss: Loss, config: Config, data: TrainData, _: int) -> Loss:
    """The loss of a run, with a teacher's part of the targets if `--optim.teacher` names one."""
    optim = config.optim
    if not optim.teacher:
        return loss
    given = optim.teacher, optim.teacher_share, optim.teacher_temperature
    teacher = Teacher(*given, config.compute, data)
    if teacher.task != data.source.task:
        tasks = f"is of {teacher.task}, and the run of {data.source.task}"
        raise UserError(f"--optim.teacher {optim.teacher!a} {tasks}: they should be alike")
    return replace(loss, targets=teacher.targets, teacher=teacher.digest)


class Teacher(nn.Module):
    """Maps images and labels to targets; on every rank, whole, without gradients."""

    def __init__(
        self, run: str, share: float, temperature: float, compute: ComputeConfig, data: TrainData
    ) -> None:
        """The best weights of a run folder or checkpoint, for students of `data`.

        `share` is the teacher's part of the targets; `temperature` divides its logits.

        Raises:
            UserError: if there is no such run, or it knows too few classes.
        """
        super().__init__()
        trained = load_model(run, compute, data.world)
        classes = data.source.classes
        mean = data.source.mean
        std = data.source.std
        if unknown := tuple(name for name in classes if name not in trained.classes):
            raise UserError(
                f"--optim.teacher {run!a} does not know all classes of the images: it knows "
                f"{some(trained.classes)}; it lacks {some(unknown)}"
            )
        if len(mean) != len(trained.mean):
            raise UserError(
                f"--optim.teacher {run!a} knows images of {len(trained.mean)} channels, and these "
                f"have {len(mean)}"
            )
        self.digest = trained.digest
        self.task = trained.config.model.task
        self.model = trained.model
        self.side = trained.config.data.image_size
        self.of_logits = TASKS[self.task].probabilities
        self.has_several = data.source.is_multi_label
        self.share = share
        self.temperature = temperature
        if compute.compile:
            self.model.compile(dynamic=False)
        place = {"device": data.world.device}
        self.outputs = torch.tensor([trained.classes.index(name) for name in classes], **place)
        # From the student's normalization to the teacher's.
        theirs = zip(mean, std, trained.mean, trained.std, strict=True)
        scale_and_shift = [(s / own_s, (m - own_m) / own_s) for m, s, own_m, own_s in theirs]
        self.scale, self.shift = torch.tensor(scale_and_shift, **place).T[:, :, None, None]

    def targets(self, batch: Augmented) -> Augmented:
        """A micro-batch with the targets in place of its labels."""
        return batch._replace(labels=self(batch.images, batch.labels))

    @torch.no_grad()
    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The targets of a micro-batch: (batch, classes) float32.

        Args:
            images: (batch, 3, side, side) float32, augmented and normalized as for the student.
            labels: as `Augmented` has them; what is unknown of several stays unknown.
        """
        if self.has_several:
            mixed = labels.float().lerp(self.probabilities(images), self.share)
            return mixed.masked_fill(labels < 0, LEFT_OUT)
        if not labels.is_floating_point():
            numbers = torch.arange(len(self.outputs), device=labels.device)
            labels = (labels[:, None] == numbers).float()
        # An image that could not be read, or its part of a mixture, has no targets.
        known = labels.sum(dim=1, keepdim=True)
        return labels.lerp(known * self.probabilities(images), self.share)

    def probabilities(self, images: Tensor) -> Tensor:
        """The teacher's, of the student's classes: (batch, classes) float32."""
        images = images * self.scale + self.shift
        if images.shape[2] != self.side:  # as large as those that it was trained on
            size = self.side, self.side
            images = interpolate(images, size, mode="bilinear", antialias=True)
        logits = self.model(images).index_select(1, self.outputs)
        return self.of_logits(logits.float() / self.temperature)
