"""What a run says of itself: its folder, the lines it prints, and `metrics.jsonl`."""

import contextlib
import json
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..config import Config, flatten
from ..data import Batch, EvalData, TrainData
from ..precision import Precision
from ..predictions import Answers, phrase, scores_text
from ..runtime.console import clock
from ..runtime.distributed import World
from ..runtime.machine import device_name
from ..runtime.printable import printable
from ..runtime.run_dir import append_lines, environment, forget_rows_after, write_json
from ..runtime.signals import StoppedError
from .bottleneck import Watch
from .flops import Cost, amount, build_effort, cost_of
from .monitor import Monitor
from .peak import Peak, find_peak
from .trackers import Trackers, confusion_picture


class Report:
    """Progress of one run, on the terminal and in its folder; ranks other than 0 are quiet."""

    def __init__(
        self,
        config: Config,
        world: World,
        train_data: TrainData,
        total_steps: int,
        saved: dict[str, Any] | None,
    ) -> None:
        """Begin, or go on from a checkpoint: what was logged of later steps is forgotten."""
        self.train_data, self.watch = train_data, Watch(config, world, train_data)
        self.config, self.world, self.run = config, world, config.run
        self.batch_size = config.data.batch_size
        self.folder = Path(config.run.dir)
        self.page = open_page(self.folder)
        self.warnings: Sequence[str] = ()  # that were said before the first step
        self.steps_per_epoch, self.total_steps = train_data.steps_per_epoch, total_steps
        self.start_step = start_step = saved["state"]["step"] if saved else 0
        row = saved["report"] if saved else {"loss": 0.0, "step": 0}
        self.loss = torch.full((), row["loss"], device=world.device)  # summed since `row_step`
        self.row_step = row["step"]  # of the last row with a training loss
        self.step = start_step
        self.monitor = Monitor(world)
        self.joules_before = row.get("joules", 0.0)  # what the run took before this start
        self.epoch_joules = self.joules_before  # what it had taken at the last verdict
        self.cost: Cost | None = None  # of the model, on rank 0
        self.peak: Peak | None = None  # of the device
        self.effort_at = build_effort(config, self.steps_per_epoch, total_steps)
        self.top1: float | None = None  # of the last evaluation
        self.message = ""  # on how it ended, where there is something to say
        self.began = time.monotonic()
        self.epoch = [0.0, 0.0, 0.0]  # images, seconds and seconds without images since a verdict
        self.restart_clock(start_step)
        self.is_live = sys.stdout.isatty()
        self.trackers = Trackers(self.say)
        self.unwritten: list[str] = []  # rows that the disk had no space for
        if world.is_main:
            write_json(self.folder / "config.json", flatten(config))
            write_json(self.folder / "environment.json", environment(world))

    def __enter__(self) -> "Report":
        """Say that the run is under way, and open what it is logged to."""
        self.write_status("running")
        if self.world.is_main:
            forget_rows_after(self.folder / "metrics.jsonl", self.start_step)
            self.trackers.begin(self.config, self.folder, self.start_step)
        self.monitor.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, _: object) -> None:
        """Say how it ended."""
        self.monitor.__exit__()
        if kind is None:
            self.write_status("done", self.message)
        elif isinstance(error, StoppedError):
            self.write_status("interrupted", str(error), signal=error.name)
        elif issubclass(kind, KeyboardInterrupt):
            self.write_status("interrupted")
        else:
            self.write_status("failed", f"{kind.__name__}: {error}")
        self.trackers.close(kind is None)

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
        begun: str,
        promise: str,
        warnings: Sequence[str],
    ) -> None:
        """Print what this run is made of, and what is most likely wrong with it.

        `frozen` weights rest at first. `begun` says what weights the run begins with, `promise` how
        far it repeats itself.
        """
        self.warnings = warnings
        train_data, world = self.train_data, self.world
        weights = sum(weight.numel() for weight in model.parameters())
        processes = f"{world.size} processes" if world.size > 1 else "1 process"
        self.say(
            f"{len(train_data):,} training and {len(val_data):,} validation images of "
            f"{train_data.num_classes} classes"
        )
        for note in (*train_data.source.notes, *val_data.source.notes):
            self.say(note)
        for warning in warnings:
            self.say(f"warning: {warning}")
        self.say(f"images: {train_data.where}: {train_data.reason}")
        self.say(f"{type(model).__name__}: {weights:,} weights; {begun}")
        if world.why_cpu:
            self.say(f"on the CPU: {world.why_cpu}")
        if world.device.type == "cpu":
            count = torch.get_num_threads()
            processes += f" of {count} threads" if count > 1 else " of 1 thread"
        self.say(f"{device_name(world.device)}, {processes}, {precision.name}; {promise}")
        self.introduce_costs(model, precision, val_data.batch_size, frozen)
        folder = printable(str(self.folder))
        self.say(f"{folder}: from step {self.start_step} of {self.total_steps}")

    def introduce_costs(
        self,
        model: nn.Module,
        precision: Precision,
        micro_batch: int,
        frozen: Sequence[nn.Parameter],
    ) -> None:
        """Print what an image costs, and what the device could do at the most."""
        if not self.world.is_main:
            return
        self.cost = cost_of(model, self.config.data.image_size, precision, frozen)
        if self.cost.trainable < self.cost.weights:
            self.say(f"{self.cost.trainable:,} of the weights are trained")
        line, thaw_epochs = self.cost.phrase(micro_batch), self.config.optim.frozen_epochs
        if frozen and self.start_step < round(thaw_epochs * self.steps_per_epoch):
            learning = self.cost.trainable - sum(weight.numel() for weight in frozen)
            line += f"; at first only the last layer is trained, {learning:,} weights"
        self.say(line)
        if self.cost.flops:
            self.peak = find_peak(precision)
        if self.peak:
            self.say(f"peak: {amount(self.peak.flops)}FLOP/s by {self.peak.origin}")
        if self.monitor.note:
            self.say(self.monitor.note)

    def watched(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches; what is done with them is looked at."""
        steps = self.watch.steps(batches)
        for step, (batch, is_timed) in enumerate(steps, start=self.start_step + 1):
            self.step = step
            yield batch
            if step == self.start_step + 1:
                self.say(self.watch.start())
            if not is_timed or self.was_saved:
                self.restart_clock(step)

    def count(self, loss: Tensor) -> None:
        """Add the loss of a step, or of a part of it; it stays on the device."""
        loss = loss.detach()
        if self.run.on_nonfinite == "skip":  # such a step counts nothing in the mean
            loss = loss.nan_to_num(0.0, 0.0, 0.0)
        self.loss += loss

    def write_progress(self, step: int, lr: float, more: dict[str, float]) -> None:
        """Log the mean loss since the last row and how fast it goes. Waits for the device.

        `more` is logged beside it.
        At the end of an epoch it also says what bounds the speed.
        """
        loss = float(self.world.sum(self.loss)) / self.world.size / (step - self.row_step)
        now = time.monotonic()
        spent = (
            (step - self.marked_step) * self.batch_size,
            now - self.marked,
            self.train_data.waited_seconds - self.marked_wait,
        )
        rate, waited = speed(*spent)
        memory = memory_bytes(self.world.device)
        readings, joules, mfu = self.monitor.metrics(), self.joules(), self.mfu(rate)
        metrics = {
            "train/loss": loss,
            "train/lr": lr,
            "train/images_per_second": round(rate, 1),
            "train/waited_fraction": round(waited, 4),
            "memory_bytes": memory,
            **({"train/mfu": round(mfu, 4)} if mfu else {}),
            **readings,
            **({"energy_joules": round(joules, 1)} if joules else {}),
            **more,
            **self.train_data.bad_images.metrics(),
        }
        self.write(step, metrics)
        left = (now - self.began) / (step - self.start_step) * (self.total_steps - step)
        top1 = "" if self.top1 is None else f"  top-1 {self.top1:.1%}"
        device = self.monitor.phrase(readings)
        self.show(
            f"{self.place(step)}  loss {loss:.4f}{top1}  lr {lr:.1e}  {rate:,.0f} images/s  "
            f"waited {waited:.0%}  {device}{'  ' * bool(device)}{memory / 2**30:.1f} GB  "
            f"left {clock(left)}"
        )
        self.epoch = [sum(pair) for pair in zip(self.epoch, spent, strict=True)]
        if step % self.steps_per_epoch == 0:
            rate, waited = speed(*self.epoch)
            costs = self.epoch_costs(rate, joules)
            self.say(f"{self.place(step)}  {self.watch.verdict(rate, waited)}{costs}")
            if told := self.train_data.bad_images.told():
                self.say(told)
            self.epoch = [0.0, 0.0, 0.0]
        self.loss.zero_()
        self.row_step = step
        self.restart_clock(step)

    def mfu(self, rate: float) -> float | None:
        """The share of the devices' peak that training `rate` images a second makes use of.

        Model FLOPs utilisation, of https://arxiv.org/abs/2204.02311.
        """
        if self.peak is None or self.cost is None or self.cost.training_flops is None:
            return None
        flops = self.cost.training_flops * self.effort_at(self.step - 1)  # of an image, just now
        return rate * flops / (self.peak.flops * self.world.size)

    def joules(self) -> float:
        """Energy that the run's devices took so far, on all machines; 0 if it can't be measured.

        Waits for ranks.
        """
        here = torch.tensor(self.monitor.joules, dtype=torch.float32, device=self.world.device)
        return self.joules_before + float(self.world.sum(here))

    def epoch_costs(self, rate: float, joules: float) -> str:
        """How well an epoch used the device, and the energy it took, as the end of a line."""
        mfu, spent = self.mfu(rate), joules - self.epoch_joules
        self.epoch_joules = joules
        used = f"; {mfu:.0%} of the peak (MFU)" if mfu else ""
        return used + (f"; {amount(spent)}J" if spent else "")

    def write_scores(self, step: int, metrics: dict[str, float], answers: Answers) -> None:
        """Log an evaluation, and bring the page up to date if that takes little time."""
        self.top1 = metrics["val/top1"]
        self.write(step, metrics)
        self.say(f"{self.place(step)}  validation: {phrase(metrics)}")
        if step < self.total_steps and self.page.is_due:
            self.write_page(answers)
        self.restart_clock(step)

    def finish(self, metrics: dict[str, float], answers: Answers, message: str = "") -> None:
        """Print the result, class by class, and where the run is; write its page and answers.

        `message` says why it ends, if it does so early.
        """
        self.write_page(answers)
        if self.world.is_main:
            if self.trackers.open:
                pictures = {"confusion": confusion_picture(answers.confusion())}
                self.trackers.pictures(self.step, pictures | self.page.sheets(answers))
                self.trackers.finish(metrics)
            path = self.folder / "predictions.safetensors"
            try:
                answers.save(path, self.step)
            except OSError as error:
                self.say(f"cannot write {path}: {error.strerror}")
        self.say(scores_text(metrics, answers.confusion(), answers.source.classes))
        if message and self.step < self.total_steps:
            self.message = message
            self.say(message)
        took = clock(time.monotonic() - self.began)
        folder, page = map(printable, (str(self.folder), str(self.folder / "report.html")))
        self.say(f"run folder: {folder}, report: {page}, {took}")

    def write_page(self, answers: Answers) -> None:
        """Write `report.html` on the last evaluation, which is no reason to end.

        A disk may be full, or what was written to it before may have been changed.
        """
        if self.world.is_main:
            try:
                self.page.warnings = [*self.warnings, *self.train_data.warnings]
                self.page.write(answers, self.state_text("running"))
            except (OSError, ValueError, LookupError, TypeError) as error:
                reason = getattr(error, "strerror", None) or repr(error)
                self.say(f"cannot write {self.page.path}: {reason}")

    def state_text(self, state: str) -> str:
        """How the run stands, as its page says it."""
        now = time.strftime("%Y-%m-%d %H:%M")
        return f"step {self.step:,} of {self.total_steps:,}, {now}, {state}"

    def place(self, step: int) -> str:
        """Where in the run `step` is."""
        width = len(str(self.total_steps))
        epoch = step / self.steps_per_epoch
        return f"step {step:>{width}}/{self.total_steps}  epoch {epoch:5.2f}"

    def show(self, line: str) -> None:
        """Print a line of progress: on a terminal in place of the last, in a log file below it."""
        if self.world.is_main and self.is_live:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\033[K{line[:width]}", end="", flush=True)
        else:
            self.say(line)

    def restart_clock(self, step: int) -> None:
        """Count images per second from here: evaluating and saving are not training."""
        self.was_saved = False
        self.marked, self.marked_step = time.monotonic(), step
        self.marked_wait = self.train_data.waited_seconds

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """One row of `metrics.jsonl`, and the same to the trackers."""
        if self.world.is_main:
            row = {"step": step, "epoch": round(step / self.steps_per_epoch, 4), **metrics}
            self.write_rows(json.dumps(row))
            self.trackers.log(step, metrics)

    def write_rows(self, row: str) -> None:
        """Add a row to `metrics.jsonl`, after those that the disk had no space for."""
        path = self.folder / "metrics.jsonl"
        end = path.stat().st_size if path.exists() else 0
        is_first = not self.unwritten
        self.unwritten.append(row)
        try:
            append_lines(path, self.unwritten)
        except OSError as error:
            with contextlib.suppress(OSError):  # nothing of what was half written
                os.truncate(path, end)
            if is_first:
                self.say(f"cannot write {path}: {error.strerror}; its rows are kept for later")
        else:
            self.unwritten = []

    def write_status(self, state: str, message: str = "", **more: str) -> None:
        """Say in `status.json` how it stands: running, done, interrupted or failed."""
        if self.world.is_main:
            status = {"state": state, "step": self.step, "message": message, **more}
            with contextlib.suppress(OSError):  # a full disk is told of by what needs it more
                write_json(self.folder / "status.json", status)
                self.page.restate(self.state_text(f"{state}: {message}" if message else state))

    def state_dict(self) -> dict[str, float]:
        """What the next row needs of the steps before a save. Waits for device and ranks."""
        self.was_saved = True
        mean = self.world.sum(self.loss.clone()) / self.world.size
        return {"loss": float(mean), "step": self.row_step, "joules": self.joules()}


class NoPage:
    """What stands in for the report page where `tools/report` was deleted."""

    is_due, path = False, ""

    def look_on(self, augment: Callable, _: object) -> Callable:
        """Keep nothing of the training images."""
        return augment

    def write(self, *_: object) -> None:
        """Write nothing."""

    restate = write

    def sheets(self, _: object) -> dict:
        """No images."""
        return {}


def open_page(folder: Path) -> Any:  # noqa: ANN401 - a tool, which may have been deleted
    """The report page of the run in `folder`."""
    tools = f"{__package__.rpartition('.')[0]}.tools"
    if find_spec(tools) is None or find_spec(f"{tools}.report") is None:
        return NoPage()
    return import_module(f"{tools}.report.page").Page(folder)


def speed(num_images: float, seconds: float, waited_seconds: float) -> tuple[float, float]:
    """Images per second, and the share of the time that was spent waiting for them."""
    return num_images / seconds, waited_seconds / seconds


def memory_bytes(device: torch.device) -> int:
    """The most memory used so far: of the GPU, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
