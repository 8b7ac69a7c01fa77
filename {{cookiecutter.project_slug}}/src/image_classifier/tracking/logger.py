"""The log of a run: `metrics.jsonl`, progress lines, `status.json`.

The training loop tells it of every step; it tells watchers, observers and trackers.
"""

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from math import isfinite
from pathlib import Path

import torch
from torch import Tensor, nn

from ..checkpoints import TrainState
from ..data import Augmented
from ..errors import FaultError
from ..evaluate import Scores
from ..extensions import find_tools, joined
from ..metrics import METRICS, choose_decision, metric_text, phrase
from ..runtime import console
from ..runtime.config_dict import to_save
from ..runtime.console import clock, printable
from ..runtime.files import append_lines, forget_rows_after, write_json
from ..runtime.machine import device_name
from ..runtime.platform import peak_memory_bytes
from ..runtime.run_dir import environment
from ..runtime.signals import StoppedError
from .observers import Observer, Result, Setup, Speed
from .trackers import Trackers

FIRST_LINE, NEXT_LINE, NEXT_LIVE = 5.0, 60.0, 1.0  # seconds without a progress line, at most
MOST_SKIPPED = 20  # steps in a row whose gradients are not finite; fp16 may begin with some


class RunLogger:
    """Logs one run to the terminal and to its folder; ranks other than 0 are quiet."""

    def __init__(
        self, setup: Setup, state: TrainState, saved: dict[str, float], observers: list[Observer]
    ) -> None:
        """Begin, or continue with `state` and what `state_dict` gave then; drop later rows."""
        row = saved or {"loss": 0.0, "step": 0}
        self.setup = setup
        self.config = setup.config
        self.world = setup.world
        self.state = state
        self.train_data = train_data = setup.train_data
        self.steps_per_epoch = train_data.steps_per_epoch
        self.total_steps = train_data.total_steps
        self.folder = Path(self.config.run.dir)
        self.trackers = Trackers(self.say)
        self.observers = observers
        self.warnings = [line for observer in observers for line in observer.warnings]
        self.step_done = self.start_step = state.step
        # Ranks add up in doubles, which hardly round: the sum is the same wherever a run resumes.
        kind = torch.float64 if self.world.size > 1 else torch.float32
        own = row["loss"] * self.world.size if self.world.is_main else 0.0
        self.loss = torch.full((), own, dtype=kind, device=self.world.device)  # since `row_step`
        self.row_step = row["step"]  # of the last row with a training loss
        self.image_size = 0  # of the last step
        self.score = ""  # of the last evaluation, in words
        self.message = ""  # why the run ended early
        self.result: dict[str, float] = {}  # all metrics of the best weights, and their step
        self.began = time.monotonic()
        self.epoch = [0.0, 0.0, 0.0]  # steps, seconds, seconds waited for data since a verdict
        self.line_due = self.began + FIRST_LINE
        self.restart_clock(self.start_step)
        self.unwritten: list[str] = []  # rows for which the disk had no space
        self.watchers: list[Callable[[], object]] = []  # there are none yet
        if self.world.is_main:
            write_json(self.folder / "config.json", to_save(self.config))
            write_json(self.folder / "environment.json", environment(self.world))

    def __enter__(self) -> "RunLogger":
        """Mark the run as running, and open its trackers."""
        self.write_status("running")
        if self.world.is_main:
            forget_rows_after(self.folder / "metrics.jsonl", self.start_step or -1)
            self.trackers.begin(self.config, self.folder, self.start_step)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, _: object) -> None:
        """Record how the run ended."""
        if kind is None:
            self.write_status("done", self.message, result=self.result)
        elif isinstance(error, StoppedError):
            self.write_status("interrupted", str(error), signal=error.name)
        elif issubclass(kind, KeyboardInterrupt):
            self.write_status("interrupted")
        else:
            self.write_status("failed", f"{kind.__name__}: {error}")
        self.trackers.tell("close", kind is None)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """A block of steps, which watchers surround, on every rank."""
        with contextlib.ExitStack() as stack:
            for tool in find_tools("watcher").values():
                self.watchers.append(stack.enter_context(tool.watch(self.setup, self.state)))
            yield

    def say(self, line: str, is_last: bool = True) -> None:
        """Print a line, once for all processes."""
        if self.world.is_main:
            console.say(line, is_last)

    def introduce(self, init_note: str, precision_note: str) -> None:
        """Print what the run consists of, and what its observers warn of.

        The notes say which weights it starts from, why this precision, and how reproducible it is.
        """
        if not self.world.is_main:
            return
        world = self.world
        train_data = self.train_data
        val_data = self.setup.val_data
        num_weights = sum(weight.numel() for weight in self.setup.model.parameters())
        why_cpu = f" ({world.why_cpu})" if world.why_cpu else ""
        threads = torch.get_num_threads()
        lines = [
            f"{len(train_data):,} training and {len(val_data):,} validation images of "
            f"{train_data.num_classes} classes",
            *train_data.source.notes,
            *val_data.source.notes,
            *(f"warning: {warning}" for warning in self.warnings),
            f"images: {train_data.where}: {train_data.reason}",
            f"{self.config.model.name}: {num_weights:,} weights; {init_note}",
            f"{device_name(world.device)}{why_cpu}, {world.size} process{'es' * (world.size > 1)}, "
            f"{threads} thread{'s' * (threads > 1)} each, {self.setup.precision.name}; "
            f"{precision_note}",
        ]
        lines += [note for observer in self.observers for note in observer.notes]
        begins = f"{printable(str(self.folder))}: from step {self.start_step} of {self.total_steps}"
        self.say("\n".join([*lines, begins]))

    def step(self, step: int, loss: Tensor, batch: Augmented) -> None:
        """Take note of a step, and print a line in slow runs, without waiting for the device.

        `step` is how many are done; `loss`, () on the device, is of `batch`, this rank's share as
        the model saw it. Watchers are told last, and may take time that is not training's.
        """
        self.loss += loss
        self.step_done = step
        self.image_size = batch.images.shape[-1]
        if step == self.start_step + 1:
            for observer in self.observers:
                observer.begin(step, batch)
            self.restart_clock(step)  # it compiles
        elif self.was_paused:
            self.restart_clock(step)
        elif time.monotonic() > self.line_due:
            every = self.config.run.log_every_steps
            if 0 not in (step % every, step % self.steps_per_epoch, self.total_steps - step):
                self.show(step, str(self.speed(*self.spent(step)) or ""))
        for watcher in self.watchers:
            self.was_paused |= bool(watcher())

    def progress(self, step: int, lr: float) -> None:
        """Log the mean loss since the last row, and the throughput. Waits for the device.

        At the end of an epoch, also print what observers say of it.

        Raises:
            FaultError: if a loss is inf or nan, on every rank.
        """
        loss = self.summed_loss(step) / (step - self.row_step)
        spent = self.spent(step)
        metrics = {"train/loss": loss, "train/lr": lr}
        if speed := self.speed(*spent):
            metrics["train/images_per_second"] = round(speed.images_per_second, 1)
            metrics["train/waited_fraction"] = round(speed.waited, 4)
        metrics["memory_bytes"] = memory = memory_bytes(self.world.device)
        for observer in self.observers:
            metrics = joined("metric", metrics, observer.metrics(speed))
        self.write(step, metrics)
        learned = f"loss {loss:.4f}{self.score}  lr {lr:.1e}  "
        self.show(step, f"{learned}{speed or ''}{memory / 2**30:.1f} GB  ")
        self.epoch = [sum(pair) for pair in zip(self.epoch, spent, strict=True)]
        if step % self.steps_per_epoch == 0:
            if speed := self.speed(*self.epoch):
                found = [observer.verdict(speed) for observer in self.observers]
                if verdict := " ".join(filter(None, found)):
                    self.say(f"{self.place(step)}  {verdict}")
            self.epoch = [0.0, 0.0, 0.0]
        self.loss.zero_()
        self.row_step = step
        self.restart_clock(step)

    def show(self, step: int, text: str) -> None:
        """Print a progress line; on a terminal the next line replaces it."""
        now = time.monotonic()
        is_live = sys.stdout.isatty()
        left = (now - self.began) / (step - self.start_step) * (self.total_steps - step)
        line = f"{self.place(step)}  {text}ETA {clock(left)}"
        self.say(line[: shutil.get_terminal_size().columns - 1] if is_live else line, not is_live)
        self.line_due = now + (NEXT_LIVE if is_live else NEXT_LINE)

    def spent(self, step: int) -> tuple[float, float, float]:
        """Steps, seconds, and seconds waited for data since the clock was restarted."""
        waited = self.train_data.waited_seconds - self.marked_wait
        return step - self.marked_step, time.monotonic() - self.marked, waited

    def speed(self, steps: float, seconds: float, waited: float) -> Speed | None:
        """Speed over steps that took and waited so many seconds; None if none were timed."""
        if not steps or not seconds:  # the clock of Windows stands still for 16 ms
            return None
        rate = steps * self.train_data.batch_size / seconds
        return Speed(self.step_done, self.image_size, rate, waited / seconds)

    def scores(self, step: int, scores: Scores, what: str, *, is_last: bool) -> None:
        """Log an evaluation, and tell observers of it.

        Some metrics take seconds, of many images and classes: the last evaluation has all.
        """
        if self.world.is_main:  # the checkpoint that follows keeps it
            self.state.decision = choose_decision(scores.predictions, self.config.run)
        best_by = self.state.best_by
        has_all = self.world.is_main and (is_last or step == self.total_steps)
        metrics = scores.metrics(*(scores.names if has_all else [best_by]))
        for observer in self.observers:
            found = observer.judge(self.state.best_model)
            joined("metric", dict.fromkeys(f"val/{name}" for name in METRICS), found)
            metrics |= found
        self.score = "  " + metric_text(best_by, scores.value(best_by), digits=1)
        if not isfinite(scores.value(best_by)):
            self.say(f"warning: --run.best-by {best_by} is no number: it chooses no best weights")
        self.write(step, metrics)
        self.say(f"{self.place(step)}  {what}: {phrase(metrics, best_by)}")
        if step < self.total_steps:
            self.conclude(scores, metrics, "not finished")
            self.write_status("running")
        self.restart_clock(step)

    def finish(self, scores: Scores, message: str, model: nn.Module | None) -> None:
        """Print the result by class, and why it ends early; write the predictions.

        `scores` are of the best weights, which `model` has; it is None if this rank has only a part
        of them.
        """
        state = self.state
        self.message = message if self.step_done < self.total_steps else ""
        others = "" if state.is_best and state.num_worse == 0 else state.best_text
        found = []
        if self.world.is_main:
            metrics = scores.metrics(*scores.names)
            self.result = {"step": state.best_step, **metrics}
            end = self.message or "finished"
            if others:
                end = f"{end if others in end else f'{end}; {others}'}; these are its scores"
            found = self.conclude(scores, metrics, end, is_last=True, model=model)
            best = {name.replace("val/", "best/"): value for name, value in metrics.items()}
            self.trackers.tell("log", self.step_done, best)
            self.trackers.tell("finish", self.step_done, scores.predictions)
            path = self.folder / "predictions.safetensors"
            try:
                scores.predictions.save(path, state.best_step)
            except OSError as error:
                self.say(f"cannot write {path}: {error.strerror}")
            self.say(scores.text(state.best_by, state.decision))
        if why := self.message or others:
            self.say(why)
        folder = printable(str(self.folder))
        took = clock(time.monotonic() - self.began)
        self.say(", ".join([f"run folder: {folder}", *found, took]))

    def conclude(
        self, scores: Scores, metrics: dict[str, float], end: str, **of_end: bool | nn.Module | None
    ) -> list[str]:
        """Tell observers of an evaluation, and how the run ended; return where they say to look."""
        steps = self.step_done, self.total_steps, self.state.best_step
        sections = [observer.section for observer in self.observers]
        of_run = {"decision": self.state.decision, "sections": sections, **of_end}
        result = Result(scores.predictions, metrics, *steps, end, self.warnings, **of_run)
        return [*filter(None, (observer.conclude(result) for observer in self.observers))]

    def place(self, step: int) -> str:
        """Step and epoch."""
        width = len(str(self.total_steps))
        epoch = step / self.steps_per_epoch
        return f"step {step:>{width}}/{self.total_steps}  epoch {epoch:5.2f}"

    def restart_clock(self, step: int) -> None:
        """Measure the throughput from here: evaluation and saving are not training."""
        self.was_paused = False
        self.marked = time.monotonic()
        self.marked_step = step
        self.marked_wait = self.train_data.waited_seconds

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Add a row to `metrics.jsonl`, and tell the trackers.

        Rows for which the disk has no space are kept, and written with a later one.
        """
        if not self.world.is_main:
            return
        path = self.folder / "metrics.jsonl"
        end = path.stat().st_size if path.exists() else 0
        place = {"step": step, "epoch": round(step / self.steps_per_epoch, 4)}
        self.unwritten.append(json.dumps(joined("metric", place, metrics)))
        try:
            append_lines(path, self.unwritten)
        except OSError as error:
            with contextlib.suppress(OSError):  # nothing half-written stays
                os.truncate(path, end)
            if len(self.unwritten) == 1:
                self.say(f"cannot write {path}: {error.strerror}; its rows are kept for later")
        else:
            self.unwritten = []
        self.trackers.tell("log", step, metrics)

    def write_status(self, state: str, message: str = "", **more: object) -> None:
        """Write `status.json`: running, done, interrupted or failed."""
        if self.world.is_main:
            status = {"state": state, "step": self.step_done, "message": message, **more}
            with contextlib.suppress(OSError):  # what needs the space more tells of a full disk
                write_json(self.folder / "status.json", status)

    def state_dict(self) -> dict[str, float]:
        """What the next row needs of the steps before a save. Waits for device and ranks."""
        self.was_paused = True
        return {"loss": self.summed_loss(self.step_done), "step": self.row_step}

    def summed_loss(self, step: int) -> float:
        """The sum of the losses since the last row, a mean over ranks. Waits for device and ranks.

        Names the step and the layer whose gradients were not finite, if there is one.

        Raises:
            FaultError: if the sum is inf or nan, or many steps in a row changed no weights.
        """
        loss = float(self.world.all_reduce_sum(self.loss.clone())) / self.world.size
        where = self.skipped_steps(step)
        if not isfinite(loss):
            raise FaultError(
                f"the loss is not finite in steps {self.row_step + 1} to {step}: stopped. "
                f"Gradients that are not finite ({where or 'none'}) did not change the weights, "
                "and the last save is sound; lower --optim.lr, or set --optim.clip-norm 1"
            )
        if (count := self.setup.precision.skipped_in_a_row) >= MOST_SKIPPED:
            raise FaultError(
                f"gradients are not finite ({where}), {count} steps in a row: stopped. They did "
                "not change the weights, and the last save is sound; take --precision fp32, or "
                "look for a root, a logarithm or a division at 0 behind that layer"
            )
        if where and not self.setup.precision.scaler.is_enabled():  # which finds its scale so
            self.say(f"warning: gradients are not finite ({where}): such a step changes no weights")
        return loss

    def skipped_steps(self, step: int) -> str:
        """The first step since the last call that changed no weights, and where that began."""
        if not (skipped := self.setup.precision.find_skipped()):
            return ""
        later, harmed = skipped[0]
        ids = set(map(id, harmed))
        names = self.setup.model.named_parameters()
        name = [name for name, weight in names if id(weight) in ids][-1]  # backwards: the first
        more = f", and {len(skipped) - 1} later" if len(skipped) > 1 else ""
        return f"in step {step - later} first that of {name}{more}"


def memory_bytes(device: torch.device) -> int:
    """Peak memory so far: of the GPU, or of this process."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_memory_bytes()
