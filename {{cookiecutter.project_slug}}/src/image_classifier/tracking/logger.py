"""The log of a run: `metrics.jsonl`, the progress line, trackers, the report page, `status.json`.

The training loop tells it of every step; it tells all others that observe a run.
"""

import contextlib
import json
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..config import Config
from ..data import EvalData, TrainData
from ..errors import FaultError
from ..evaluate import Scores
from ..precision import Precision
from ..predictions import phrase, scores_text
from ..preprocess import denormalize
from ..runtime.config_dict import flatten
from ..runtime.console import clock, printable
from ..runtime.distributed import World
from ..runtime.files import append_lines, forget_rows_after, write_json
from ..runtime.machine import device_name
from ..runtime.run_dir import environment
from ..runtime.signals import StoppedError
from .bottleneck import Bottleneck
from .flops import amount, build_training_flops, count_flops, find_peak
from .monitor import Monitor
from .trackers import Trackers, confusion_image

SAMPLES = 24  # augmented training images that the report page shows


class RunLogger:
    """Logs one run to the terminal and to its folder; ranks other than 0 are quiet."""

    def __init__(
        self, config: Config, world: World, train_data: TrainData, saved: dict[str, Any] | None
    ) -> None:
        """Begin, or continue from the checkpoint `saved`: rows of later steps are dropped."""
        self.config, self.world, self.run, self.train_data = config, world, config.run, train_data
        self.bottleneck, self.monitor = Bottleneck(config, world, train_data), Monitor(world)
        self.folder = Path(config.run.dir)
        self.page = open_page(self.folder)
        self.trackers = Trackers(self.say)
        self.warnings: Sequence[str] = ()  # printed before the first step
        self.steps_per_epoch, self.total_steps = train_data.steps_per_epoch, train_data.total_steps
        self.step_done = self.start_step = saved["state"]["step"] if saved else 0
        row = saved["report"] if saved else {"loss": 0.0, "step": 0}
        self.loss = torch.full((), row["loss"], device=world.device)  # summed since `row_step`
        self.row_step = row["step"]  # of the last row with a training loss
        self.training_flops_at: Callable[[int], float] | None = None  # of an image, on rank 0
        self.peak_flops = 0.0  # of the device, per second
        self.top1: float | None = None  # of the last evaluation
        self.message = ""  # why the run ended early
        self.began = time.monotonic()
        self.epoch = [0.0, 0.0, 0.0]  # images, seconds, seconds waited for data since a verdict
        self.restart_clock(self.start_step)
        self.is_live = sys.stdout.isatty()
        self.unwritten: list[str] = []  # rows for which the disk had no space
        if world.is_main:
            write_json(self.folder / "config.json", flatten(config))
            write_json(self.folder / "environment.json", environment(world))

    def __enter__(self) -> "RunLogger":
        """Mark the run as running, and open its trackers."""
        self.write_status("running")
        if self.world.is_main:
            forget_rows_after(self.folder / "metrics.jsonl", self.start_step)
            self.trackers.begin(self.config, self.folder, self.start_step)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, _: object) -> None:
        """Record how the run ended."""
        if kind is None:
            self.write_status("done", self.message)
        elif isinstance(error, StoppedError):
            self.write_status("interrupted", str(error), signal=error.name)
        elif issubclass(kind, KeyboardInterrupt):
            self.write_status("interrupted")
        else:
            self.write_status("failed", f"{kind.__name__}: {error}")
        self.trackers.tell("close", kind is None)

    def say(self, line: str) -> None:
        """Print a line, once for all processes."""
        if self.world.is_main:
            print(("\r\033[K" if self.is_live else "") + line, flush=True)

    def introduce(
        self,
        val_data: EvalData,
        model: nn.Module,
        precision: Precision,
        *,
        frozen: Sequence[nn.Parameter],
        unfreeze_step: int,
        init_note: str,
        precision_note: str,
        warnings: Sequence[str],
    ) -> None:
        """Print what the run consists of, and warnings about it.

        Args:
            val_data: the validation images.
            model: the network, on the device.
            precision: its number format.
            frozen: weights that are not trained before `unfreeze_step`.
            unfreeze_step: the first step that trains all weights.
            init_note: which weights it starts from.
            precision_note: why this precision, and how reproducible the run is.
            warnings: what is probably a mistake.
        """
        self.warnings = warnings
        train_data, world = self.train_data, self.world
        weights = sum(weight.numel() for weight in model.parameters())
        self.say(
            f"{len(train_data):,} training and {len(val_data):,} validation images of "
            f"{train_data.num_classes} classes"
        )
        for note in (*train_data.source.notes, *val_data.source.notes):
            self.say(note)
        for warning in warnings:
            self.say(f"warning: {warning}")
        self.say(f"images: {train_data.where}: {train_data.reason}")
        self.say(f"{type(model).__name__}: {weights:,} weights; {init_note}")
        if world.why_cpu:
            self.say(f"on the CPU: {world.why_cpu}")
        processes = f"{world.size} processes" if world.size > 1 else "1 process"
        if world.device.type == "cpu":
            count = torch.get_num_threads()
            processes += f" of {count} threads" if count > 1 else " of 1 thread"
        self.say(f"{device_name(world.device)}, {processes}, {precision.name}; {precision_note}")
        if world.is_main:
            self.introduce_cost(model, precision, frozen, unfreeze_step)
        folder = printable(str(self.folder))
        self.say(f"{folder}: from step {self.start_step} of {self.total_steps}")

    def introduce_cost(
        self,
        model: nn.Module,
        precision: Precision,
        frozen: Sequence[nn.Parameter],
        unfreeze_step: int,
    ) -> None:
        """Print how many weights are trained, the FLOPs of an image, and the device's peak."""
        weights = list(model.parameters())
        at_first = sum(weight.numel() for weight in weights if weight.requires_grad)
        trained = at_first + sum(weight.numel() for weight in frozen)
        if trained < sum(weight.numel() for weight in weights):
            self.say(f"{trained:,} of the weights are trained")
        if self.start_step < unfreeze_step:
            self.say(f"the first epochs train only the last layer, {at_first:,} weights")
        if flops := count_flops(model, self.config.data.image_size):
            self.training_flops_at = build_training_flops(
                self.config, flops, unfreeze_step, self.steps_per_epoch, self.total_steps
            )
            self.peak_flops, source = find_peak(precision)
            self.say(
                f"an image: {amount(flops)}FLOP forward, {amount(3 * flops)}FLOP in training; "
                f"peak of the device: {amount(self.peak_flops)}FLOP/s ({source})"
            )
        if self.monitor.note:
            self.say(self.monitor.note)

    def step(self, step: int, loss: Tensor, images: Tensor, labels: Tensor) -> None:
        """Take note of a step; nothing here waits for the device.

        Args:
            step: how many steps are done.
            loss: of this rank's share of the batch, () on the device.
            images: (batch, 3, size, size) float32, as the model saw them.
            labels: (batch,) int64 or (batch, classes) float32.
        """
        self.loss += loss
        self.step_done = step
        if step == self.start_step + 1:
            self.say(self.bottleneck.started())
            self.page.record_augmented_samples(
                denormalize(images[:SAMPLES], self.train_data.source), labels[:SAMPLES], step
            )
            self.restart_clock(step)
        elif self.was_saved:
            self.restart_clock(step)

    def progress(self, step: int, lr: float) -> None:
        """Log the mean loss since the last row, and the throughput. Waits for the device.

        At the end of an epoch, also print what limits the throughput.

        Raises:
            FaultError: if a loss is inf or nan, on every rank.
        """
        loss = self.summed_loss(step) / (step - self.row_step)
        now = time.monotonic()
        spent = (
            (step - self.marked_step) * self.train_data.batch_size,
            now - self.marked,
            self.train_data.waited_seconds - self.marked_wait,
        )
        rate, waited = speed(*spent)
        memory, mfu = memory_bytes(self.world.device), self.mfu(rate)
        readings = self.monitor.metrics()
        metrics = {
            "train/loss": loss,
            "train/lr": lr,
            "train/images_per_second": round(rate, 1),
            "train/waited_fraction": round(waited, 4),
            "memory_bytes": memory,
            **({"train/mfu": round(mfu, 4)} if mfu else {}),
            **readings,
            **self.train_data.bad_images.metrics(),
        }
        self.write(step, metrics)
        left = (now - self.began) / (step - self.start_step) * (self.total_steps - step)
        top1 = "" if self.top1 is None else f"  top-1 {self.top1:.1%}"
        device = self.monitor.phrase(readings)
        self.show(
            f"{self.place(step)}  loss {loss:.4f}{top1}  lr {lr:.1e}  {rate:,.0f} images/s  "
            f"waited {waited:.0%}  {device}{'  ' * bool(device)}{memory / 2**30:.1f} GB  "
            f"ETA {clock(left)}"
        )
        self.epoch = [sum(pair) for pair in zip(self.epoch, spent, strict=True)]
        if step % self.steps_per_epoch == 0:
            rate, waited = speed(*self.epoch)
            mfu = self.mfu(rate)
            used = f" MFU {mfu:.0%}." if mfu else ""
            self.say(f"{self.place(step)}  {self.bottleneck.verdict(rate, waited)}{used}")
            if told := self.train_data.bad_images.told():
                self.say(told)
            self.epoch = [0.0, 0.0, 0.0]
        self.loss.zero_()
        self.row_step = step
        self.restart_clock(step)

    def mfu(self, rate: float) -> float | None:
        """Model FLOPs utilisation at `rate` images per second: https://arxiv.org/abs/2204.02311."""
        if self.training_flops_at is None:
            return None
        flops = rate * self.training_flops_at(self.step_done - 1)
        return flops / (self.peak_flops * self.world.size)

    def scores(self, step: int, scores: Scores) -> None:
        """Log an evaluation, and rewrite the report page if that takes little time."""
        metrics = scores.metrics()
        self.top1 = scores.top1
        self.write(step, metrics)
        self.say(f"{self.place(step)}  validation: {phrase(metrics)}")
        if step < self.total_steps and self.page.is_due:
            self.write_page(scores)
        self.restart_clock(step)

    def finish(self, scores: Scores, message: str = "") -> None:
        """Print the result by class, and write the page and the predictions.

        `message` says why the run ends early.
        """
        self.write_page(scores)
        metrics, predictions = scores.metrics(), scores.predictions
        if self.world.is_main:
            if self.trackers.open:
                images = {"confusion": confusion_image(scores.confusion)}
                self.trackers.tell(
                    "images", self.step_done, images | self.page.contact_sheets(predictions)
                )
            path = self.folder / "predictions.safetensors"
            try:
                predictions.save(path, self.step_done)
            except OSError as error:
                self.say(f"cannot write {path}: {error.strerror}")
        self.say(scores_text(metrics, scores.confusion, predictions.source.classes))
        if message and self.step_done < self.total_steps:
            self.message = message
            self.say(message)
        took = clock(time.monotonic() - self.began)
        folder, page = map(printable, (str(self.folder), str(self.page.path)))
        self.say(f"run folder: {folder}{', report: ' * bool(page)}{page}, {took}")

    def write_page(self, scores: Scores) -> None:
        """Write the report page; if that fails, print a line and go on.

        A disk may be full, or files that it reads may have been changed.
        """
        if self.world.is_main:
            try:
                self.page.warnings = self.warnings
                self.page.write(scores.predictions, self.state_text("running"))
            except (OSError, ValueError, LookupError, TypeError) as error:
                reason = getattr(error, "strerror", None) or repr(error)
                self.say(f"cannot write {self.page.path}: {reason}")

    def state_text(self, state: str) -> str:
        """The state of the run for its page."""
        now = time.strftime("%Y-%m-%d %H:%M")
        return f"step {self.step_done:,} of {self.total_steps:,}, {now}, {state}"

    def place(self, step: int) -> str:
        """Step and epoch."""
        width = len(str(self.total_steps))
        epoch = step / self.steps_per_epoch
        return f"step {step:>{width}}/{self.total_steps}  epoch {epoch:5.2f}"

    def show(self, line: str) -> None:
        """Print a progress line: on a terminal it replaces the last one."""
        if self.world.is_main and self.is_live:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\033[K{line[:width]}", end="", flush=True)
        else:
            self.say(line)

    def restart_clock(self, step: int) -> None:
        """Measure the throughput from here: evaluation and saving are not training."""
        self.was_saved = False
        self.marked, self.marked_step = time.monotonic(), step
        self.marked_wait = self.train_data.waited_seconds

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Add a row to `metrics.jsonl`, and tell the trackers."""
        if self.world.is_main:
            row = {"step": step, "epoch": round(step / self.steps_per_epoch, 4), **metrics}
            self.write_rows(json.dumps(row))
            self.trackers.tell("log", step, metrics)

    def write_rows(self, row: str) -> None:
        """Add a row to `metrics.jsonl`, after those for which the disk had no space."""
        path = self.folder / "metrics.jsonl"
        end = path.stat().st_size if path.exists() else 0
        is_first = not self.unwritten
        self.unwritten.append(row)
        try:
            append_lines(path, self.unwritten)
        except OSError as error:
            with contextlib.suppress(OSError):  # nothing half-written stays
                os.truncate(path, end)
            if is_first:
                self.say(f"cannot write {path}: {error.strerror}; its rows are kept for later")
        else:
            self.unwritten = []

    def write_status(self, state: str, message: str = "", **more: str) -> None:
        """Write `status.json`: running, done, interrupted or failed."""
        if self.world.is_main:
            status = {"state": state, "step": self.step_done, "message": message, **more}
            with contextlib.suppress(OSError):  # what needs the space more tells of a full disk
                write_json(self.folder / "status.json", status)
                self.page.restate(self.state_text(f"{state}: {message}" if message else state))

    def state_dict(self) -> dict[str, float]:
        """What the next row needs of the steps before a save. Waits for device and ranks."""
        self.was_saved = True
        return {"loss": self.summed_loss(self.step_done), "step": self.row_step}

    def summed_loss(self, step: int) -> float:
        """The sum of the losses since the last row, a mean over ranks. Waits for device and ranks.

        Raises:
            FaultError: if it is inf or nan.
        """
        loss = float(self.world.all_reduce_sum(self.loss.clone())) / self.world.size
        if not isfinite(loss):
            raise FaultError(
                f"the loss is not finite in steps {self.row_step + 1} to {step}: stopped. "
                "Gradients that are not finite did not change the weights, and the last save is "
                "sound; lower --optim.lr, or set --optim.clip-norm 1"
            )
        return loss


class NoPage:
    """What stands in for the report page where `tools/report` was deleted."""

    is_due, path = False, ""

    def write(self, *_: object) -> None:
        """Write nothing."""

    restate = record_augmented_samples = write

    def contact_sheets(self, _: object) -> dict:
        """No images."""
        return {}


def open_page(folder: Path) -> Any:  # noqa: ANN401 - a tool, which may have been deleted
    """The report page of the run in `folder`."""
    tools = f"{__package__.rpartition('.')[0]}.tools"
    if find_spec(tools) is None or find_spec(f"{tools}.report") is None:
        return NoPage()
    return import_module(f"{tools}.report.page").Page(folder)


def speed(num_images: float, seconds: float, waited_seconds: float) -> tuple[float, float]:
    """Images per second, and the fraction of the time that was spent waiting for data."""
    return num_images / seconds, waited_seconds / seconds


def memory_bytes(device: torch.device) -> int:
    """Peak memory so far: of the GPU, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
