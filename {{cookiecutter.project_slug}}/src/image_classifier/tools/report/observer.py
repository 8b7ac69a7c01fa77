"""When a run writes its page: after evaluations, and at its end."""

import time
from pathlib import Path

from ...data import Augmented
from ...extensions import function
from ...runtime.console import printable, say
from ...tracking import Observer, Result, Setup
from ..pictures.pictures import denormalize
from . import page

SAMPLES = 24  # augmented training images that the page shows
PAGE_SECONDS = 60.0  # between two writings of the page, which take a second or less


def open_observer(setup: Setup) -> Observer:
    """Keep images of the first step, and write the page once in a while."""
    folder = Path(setup.config.run.dir)
    samples: page.Samples | None = None
    written = time.monotonic()

    def begin(step: int, batch: Augmented) -> None:
        nonlocal samples
        pixels = denormalize(batch.images[:SAMPLES], setup.train_data.source)
        samples = pixels, batch.labels[:SAMPLES].clone(), step

    def conclude(result: Result) -> str:
        nonlocal written
        if not result.is_last and time.monotonic() - written < PAGE_SECONDS:
            return ""
        open_explainer = result.model and function("heat", "open_explainer")
        explain = open_explainer and open_explainer(result.model, setup.normalize, setup.val_data)
        try:
            page.write_page(folder, result, samples, explain)
        except Exception as error:  # a full disk, or files that were changed
            say(f"cannot write {folder}/report.html: {error!r}")
        written = time.monotonic()
        return f"report: {printable(str(folder))}/report.html"

    return Observer(begin=begin, conclude=conclude)
