"""`--run.trackers mlflow`."""

import os
import shlex
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from ...errors import UserError
from ...metrics import Predictions
from ...runtime.files import lock_file, write_text
from ...tracking import PROJECT, Knobs, Tracker
from ..pictures.pictures import pictures_of

LIBRARY = "mlflow-skinny" + " sqlalchemy alembic" * ("MLFLOW_TRACKING_URI" not in os.environ)
T = TypeVar("T")
MOST_PARAMS = 100  # in one request
POLL_SECONDS = 0.1  # between two looks at whether another run makes the database
# It would send usage data, print that it makes its tables, and wait minutes for a server.
SETTINGS = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_LOGGING_LEVEL": "WARNING"}
SETTINGS |= {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}


def open_tracker(folder: Path, knobs: Knobs, start_step: int) -> Tracker:  # noqa: ARG001
    """MLflow: a database beside the run folder, or the server of `MLFLOW_TRACKING_URI`.

    The same folder is the same run. It sends no code, machine data or command line; the report,
    which has images and paths, stays on this machine.
    """
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient, MlflowException
    from mlflow.entities import Metric, Param

    place = folder.resolve().parent
    server = os.environ.get("MLFLOW_TRACKING_URI")
    address = server or f"sqlite:///{(place / 'mlflow.db').as_posix()}"
    client = (
        MlflowClient(address) if server else one_at_a_time(lambda: MlflowClient(address), place)
    )
    id_file = folder / "mlflow.id"
    if id_file.exists():
        run = id_file.read_text().strip()
        try:
            client.update_run(run, status="RUNNING")
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":  # such as a server that is down
                raise
            raise ValueError(f"{id_file} names no run of {address}: delete it") from error
    else:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        with suppress(MlflowException):  # it is there, perhaps since another run asked, too
            artifacts = None if server else (place / "mlartifacts").as_uri()
            client.create_experiment(name, artifacts)
        experiment = client.get_experiment_by_name(name)
        created = client.create_run(experiment.experiment_id, run_name=folder.resolve().name)
        run = created.info.run_id
        write_text(id_file, run)
        # Once: a run that goes on may have other values where that is free, and these can't change.
        params = [Param(knob, str(value)) for knob, value in knobs.items()]
        for start in range(0, len(params), MOST_PARAMS):
            client.log_batch(run, params=params[start : start + MOST_PARAMS])

    def log(step: int, metrics: dict[str, float]) -> None:
        now = round(1000 * time.time())  # milliseconds
        values = [Metric(name, value, now, step) for name, value in metrics.items()]
        client.log_batch(run, metrics=values)

    def finish(_: int, predictions: Predictions) -> None:
        for name, pixels in pictures_of(predictions).items():
            client.log_image(run, pixels, f"{name}.png")
        report = folder / "report.html"
        if report.exists() and not server:
            client.log_artifact(run, str(report))

    return Tracker(
        log=log,
        finish=finish,
        close=lambda is_done: client.set_terminated(run, "FINISHED" if is_done else "FAILED"),
        note=str(server or f"to view: mlflow ui --backend-store-uri {shlex.quote(address)}"),
    )


def one_at_a_time(make: Callable[[], T], place: Path) -> T:
    """What `make` returns. Runs that begin at once in `place` would all make the same tables."""
    path = place / ".mlflow.lock"
    with path.open("a") as lock:
        is_taken = True
        while is_taken:
            try:
                lock_file(lock, "")
                is_taken = False
            except UserError:
                time.sleep(POLL_SECONDS)
        made = make()
    with suppress(OSError):  # Windows keeps what another has open
        path.unlink()  # who still waits for it finds all tables
    return made
