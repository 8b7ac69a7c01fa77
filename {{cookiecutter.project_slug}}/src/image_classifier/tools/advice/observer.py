"""What a run says at its end: what it confuses, and whether fine-tuning gained over the probe."""

from contextlib import suppress
from pathlib import Path

from torch import Tensor

from ...extensions import find_tool, option
from ...metrics import Predictions, counted_and_correct
from ...runtime.console import printable, say
from ...tracking import Observer, Result, Setup

SHOWN = 2  # pairs of classes
LEAST = 2  # mistakes of a pair that is shown


def open_observer(setup: Setup) -> Observer:
    """Keep the predictions before the first step, which are those of a linear probe.

    They are in a file: a run that goes on has them, too.
    """
    train = setup.train_data.source
    runs = find_tool("saved_runs", "runs")
    path = Path(setup.config.run.dir, "probe.safetensors")
    has_probe = option(setup.config, "run.init_head", "zero") == "probe"

    def conclude(result: Result) -> str:
        found = result.predictions
        if not result.is_last:
            if has_probe and result.state.startswith("step 0 of"):
                with suppress(OSError):
                    found.save(path, step=0)
            return ""
        facts = [confusions(found, train.class_counts())]
        probe = runs.read_predictions(path) if runs else None
        if probe and probe.same_images(found.source.fingerprint()):
            facts.append(gain_over(probe.predicted, found))
        if told := "; ".join(filter(None, facts)):
            say(told)
        return ""

    return Observer(conclude=conclude)


def confusions(predictions: Predictions, num_training: Tensor) -> str:
    """The pairs of classes that are confused most, with their images; nothing of several labels.

    `num_training` has the number of training images of each class: (classes,).
    """
    if predictions.source.is_multi_label:
        return ""
    table = predictions.confusion()
    sizes = table.sum(1)
    wrong = table.clone().fill_diagonal_(0)
    classes = [printable(name) for name in predictions.source.classes]
    told = []
    for place in wrong.flatten().argsort(descending=True, stable=True)[:SHOWN].tolist():
        true, taken = divmod(place, len(classes))
        if (count := int(wrong[true, taken])) >= LEAST:
            told.append(
                f"{classes[true]} for {classes[taken]} ({count} of {int(sizes[true])} images; "
                f"{int(num_training[true])} and {int(num_training[taken])} to train on)"
            )
    return f"most often taken: {', '.join(told)}" if told else ""


def gain_over(probe: Tensor, best: Predictions) -> str:
    """How much more of the images the best weights have right than the probe, and by chance.

    `probe` has what that predicted, as `Predictions.predicted`.
    """
    from ..runs.statistics import by_images

    (counted, before), (_, after) = (
        counted_and_correct(found, best.source.labels) for found in (probe, best.predicted)
    )
    gained = int((after & ~before).sum())
    lost = int((before & ~after).sum())
    gain = by_images(lost, gained, int(counted.sum()))
    middle = 50 * (gain.low + gain.high)
    told = f"fine-tuning gained {middle:+.1f} points over the linear probe"
    return f"{told}{certainty(gain.low, gain.high)}"


def certainty(low: float, high: float) -> str:
    """Whether a gain from `low` to `high`, shares with 95 % confidence, may be chance."""
    chance = "" if low > 0 or high < 0 else ", which may be chance"
    return f"{chance} (95 %: {100 * low:+.1f} .. {100 * high:+.1f})"
