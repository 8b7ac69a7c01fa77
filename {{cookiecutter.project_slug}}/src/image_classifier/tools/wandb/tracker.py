"""`--run.trackers wandb`."""

import os
import shlex
import uuid
from pathlib import Path

from ...metrics import Predictions
from ...runtime.files import write_text
from ...tracking import PROJECT, Knobs, Tracker
from ..pictures.pictures import pictures_of

LIBRARY = "wandb"


def open_tracker(folder: Path, knobs: Knobs, start_step: int) -> Tracker:  # noqa: ARG001
    """Weights & Biases: the same folder is the same run; without an API key it stays offline.

    It sends no code, terminal output, machine data or command line.
    """
    import wandb as library

    id_file = folder / "wandb" / "id"
    id_file.parent.mkdir(exist_ok=True)
    if not id_file.exists():
        write_text(id_file, uuid.uuid4().hex[:8])
    # Without a key `init` would ask at the terminal, and wait.
    is_online = os.environ.get("WANDB_MODE") or library.login(prompt=False, verify=False)
    disabled = ("disable_code", "disable_git", "x_disable_meta", "x_disable_machine_info")
    disabled += ("x_disable_stats", "silent")
    run = library.init(
        dir=str(folder),
        project=os.environ.get("WANDB_PROJECT") or PROJECT,
        name=folder.resolve().name,
        id=id_file.read_text().strip(),
        resume="allow",
        config=knobs,
        mode=None if is_online else "offline",
        settings=library.Settings(
            **dict.fromkeys(disabled, True),
            console="off",
            x_save_requirements=False,
            init_timeout=30,  # seconds for its server to answer
        ),
    )

    def finish(step: int, predictions: Predictions) -> None:
        for name, pixels in pictures_of(predictions).items():
            run.log({name: library.Image(pixels)}, step=step)

    offline = f"kept offline; to upload: wandb sync {shlex.quote(str(folder))}/wandb/offline-run-*"
    return Tracker(
        log=lambda step, metrics: run.log(metrics, step=step),
        finish=finish,
        close=lambda is_done: run.finish(exit_code=0 if is_done else 1),
        note=offline if run.offline else str(run.url),
    )
