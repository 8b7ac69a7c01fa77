"""How many images a run has skipped, in each row of its log and after each epoch."""

from ...tracking import Observer, Setup
from .unreadable import BadImages


def open_observer(setup: Setup) -> Observer:
    """Count what the list in the run folder has, of all processes and splits."""
    data = setup.config.data
    if data.on_bad_image == "stop":
        return Observer()
    bad = BadImages(setup.train_data.source, data, setup.config.run.dir)

    def sentence() -> str:
        count = len(bad.known())
        images = "1 image" if count == 1 else f"{count:,} images"
        return f"{images} could not be read and were skipped: {bad.path}." if count else ""

    return Observer(
        metrics=lambda _: {"data/bad_images": len(bad.known())} if bad.known() else {},
        verdict=lambda _: sentence(),
    )
