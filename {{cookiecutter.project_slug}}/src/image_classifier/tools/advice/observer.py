"""What a run says at its end: what it confuses, and whether it gained since its start, and late."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ...data import LEFT_OUT
from ...extensions import find_tool, option
from ...metrics import Predictions, counted_and_correct, mistakes_of
from ...runtime.console import printable, say
from ...tracking import Observer, Result, Setup
from ..statistics.statistics import Mean, by_images

SHOWN = 2  # pairs of classes
LEAST = 2  # mistakes of a pair that is shown
LATE = 0.75  # of a run: if it gains nothing from there on, a longer one would hardly gain


def open_observer(setup: Setup) -> Observer:
    """Keep the predictions before the first step, which are those of a linear probe, and late ones.

    They are in files: a run that goes on has them, too.
    """
    train = setup.train_data.source
    runs = find_tool("saved_runs", "runs")
    path = Path(setup.config.run.dir, "probe.safetensors")
    late = path.with_name("late.safetensors")
    has_probe = option(setup.config, "run.init_head", "zero") == "probe"

    def conclude(result: Result) -> str:
        found = result.predictions
        if not result.is_last:
            with suppress(OSError):
                if result.step == 0 and has_probe:
                    found.save(path, 0)
                if 0 < result.step <= LATE * result.total_steps:
                    replace(found, probabilities=None).save(late, result.step)  # at each one
            return ""
        facts = [confusions(found, train.class_counts())]
        if runs:
            images = found.source.fingerprint(), found.source.file_digests
            probe = runs.read_predictions(path)
            if probe and probe.are_of(*images) and not says_the_same(probe):
                facts.append(gain_over(probe.predicted, found))
            before = runs.read_predictions(late)
            has_late_part = result.step > LATE * result.total_steps  # a time limit may end it
            if has_late_part and before and before.are_of(*images):
                is_later = before.step < result.best_step
                since = before.step / result.total_steps
                facts.append(late_gain(before.predicted, found, since, is_later))
        if told := "; ".join(filter(None, facts)):
            say(told)
        return ""

    return Observer(conclude=conclude)


def says_the_same(predictions: Any) -> bool:  # noqa: ANN401 - of a tool
    """Whether all images have one class, as by a last layer of zeros that nobody fitted."""
    read = predictions.predicted[predictions.predicted != LEFT_OUT]
    return predictions.predicted.ndim == 1 and bool((read == read[0]).all())


def confusions(predictions: Predictions, num_training: Tensor) -> str:
    """The pairs of classes that are confused most, with their images; nothing of several labels.

    `num_training` has the number of training images of each class: (classes,).
    """
    if predictions.source.is_multi_label:
        return ""
    classes = predictions.source.classes
    sizes = predictions.class_counts()
    mistakes = mistakes_of(predictions.predicted, predictions.source.labels, len(classes))
    told = [
        f"{printable(classes[true])} for {printable(classes[taken])} ({count} of {sizes[true]} "
        f"images; {num_training[true]} and {num_training[taken]} to train on)"
        for true, taken, count in mistakes[:SHOWN].tolist()
        if count >= LEAST
    ]
    return f"most often taken: {', '.join(told)}" if told else ""


def gain_over(probe: Tensor, best: Predictions) -> str:
    """How much more of the images the best weights have right than those of the beginning.

    `probe` has what these predicted, as `Predictions.predicted`.
    """
    gain = gain_of(probe, best)
    if gain.mean <= 0:
        return "fine-tuning gained nothing over what it began with"
    told = f"fine-tuning gained {100 * gain.mean:+.1f} points over what it began with"
    return f"{told}{certainty(gain.low, gain.high)}"


def late_gain(late: Tensor, best: Predictions, since: float, is_later: bool) -> str:
    """What the run gained over `late` predictions, and whether a longer one may gain.

    These were made after a share `since` of the steps.
    """
    if not is_later:
        return f"nothing gained since {since:.0%} of the steps: a longer run would hardly gain"
    gain = gain_of(late, best)
    more = "may gain more" if gain.low > 0 else "would hardly gain"
    told = f"since {since:.0%} of the steps {100 * gain.mean:+.1f} points"
    return f"{told}{certainty(gain.low, gain.high)}: a longer run {more}"


def gain_of(earlier: Tensor, best: Predictions) -> Mean:
    """The share of images that the best weights have gained, with bounds of 95 % confidence."""
    counted, before = counted_and_correct(earlier, best.source.labels)
    _, after = counted_and_correct(best.predicted, best.source.labels)
    gained = int((after & ~before).sum())
    lost = int((before & ~after).sum())
    return by_images(lost, gained, int(counted.sum()))


def certainty(low: float, high: float) -> str:
    """Whether a gain from `low` to `high`, shares with 95 % confidence, may be chance."""
    chance = "" if low > 0 or high < 0 else ", which may be chance"
    return f"{chance} (95 %: {100 * low:+.1f} .. {100 * high:+.1f})"
