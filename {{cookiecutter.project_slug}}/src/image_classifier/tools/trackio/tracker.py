"""`--run.trackers trackio`."""

import os
import shlex
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from ...metrics import Predictions
from ...runtime.files import write_text
from ...tracking import PROJECT, Knobs, Tracker
from ..pictures.pictures import pictures_of

LIBRARY = "trackio"


def open_tracker(folder: Path, knobs: Knobs, start_step: int) -> Tracker:
    """trackio: a database in the run folder, or in `TRACKIO_DIR`; it starts no server.

    It reads that variable once per process. The same folder is the same run: by its name, trackio
    would go on with the latest run of that name, of whatever folder.
    """
    os.environ.setdefault("TRACKIO_DIR", str((folder / "trackio").resolve()))
    import trackio as library

    quiet = redirect_stdout(StringIO())
    with quiet:
        run = library.init(
            project=PROJECT,
            name=folder.resolve().name,
            config=knobs,
            resume="allow" if start_step else "never",
            embed=False,
            auto_log_gpu=False,  # our metrics have the device's readings
            auto_log_cpu=False,
        )

    id_file = folder / "trackio" / "id"
    id_file.parent.mkdir(exist_ok=True)
    if not id_file.exists():
        write_text(id_file, run.id)
    run.id = id_file.read_text()

    def finish(step: int, predictions: Predictions) -> None:
        for name, pixels in pictures_of(predictions).items():
            run.log({name: library.Image(pixels)}, step=step)

    def close(_: bool) -> None:
        with quiet:
            library.finish()

    place = shlex.quote(str(library.TRACKIO_DIR))
    return Tracker(
        log=lambda step, metrics: run.log(metrics, step=step),
        finish=finish,
        close=close,
        note=f"to view: TRACKIO_DIR={place} trackio show --project {PROJECT}",
    )
