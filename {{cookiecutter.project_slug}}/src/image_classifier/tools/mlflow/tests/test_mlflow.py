"""MLflow, the real one, with a store of its own: a run that goes on is one run there."""

import os
import pickle
import shlex
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import answers_of, run_alone, tiny
from conftest import start as start_process

from image_classifier.tools.mlflow.tracker import (
    one_at_a_time,
    open_tracker,
)
from image_classifier.tracking import PROJECT
from image_classifier.train import train

# Not by an import, which would take seconds in this process, too.
pytestmark = pytest.mark.skipif(not find_spec("mlflow"), reason="needs mlflow")


def tracked(folder):
    """What the store has after two starts, of which the second continued with another option."""
    run = Path(folder, "my runs", "a")
    run.mkdir(parents=True)
    (run / "report.html").write_text("<p>report")
    found = answers_of(("ant", "bee"), torch.tensor([[2, 1], [0, 3]]))
    knobs = {f"knob.{n}": n / 10 for n in range(120)} | {"data.name": ""}
    for start in (0, 2):
        tracker = open_tracker(run, knobs | {"compute.compile": bool(start)}, start)
        tracker.log(start + 1, {"val/top1": start / 10, "train/loss": 1.0})
        tracker.finish(start + 2, found)
        tracker.close(start > 0)
    from mlflow import MlflowClient

    client = MlflowClient(shlex.split(tracker.note)[-1])
    (kept,) = client.search_runs([client.get_experiment_by_name(PROJECT).experiment_id])
    history = client.get_metric_history(kept.info.run_id, "val/top1")
    return {
        "note": tracker.note,
        "name": kept.info.run_name,
        "status": kept.info.status,
        "history": [(metric.step, metric.value) for metric in history],
        "times": [metric.timestamp / 1000 for metric in history],  # in milliseconds
        "params": kept.data.params,
        "tags": kept.data.tags,
        "artifacts": sorted(file.path for file in client.list_artifacts(kept.info.run_id)),
        "files": sorted(path.name for path in Path(folder, "my runs").iterdir()),
    }


def test_a_run_that_goes_on_is_one_run_with_its_options_metrics_and_report(tmp_path):
    code, found = run_alone(tracked, str(tmp_path))
    assert code == 0
    assert found["name"] == "a"
    assert found["status"] == "FINISHED"
    assert found["history"] == [(1, 0.0), (3, 0.2)]
    assert found["times"] == pytest.approx([time.time()] * 2, abs=600)
    assert len(found["params"]) == 122
    assert found["params"]["knob.7"] == "0.7"
    assert found["params"]["compute.compile"] == "False"  # as it began
    assert found["tags"] == {"mlflow.runName": "a"}  # neither who started it, nor where
    assert found["artifacts"] == ["confusion.png", "report.html"]
    assert found["files"] == ["a", "mlartifacts", "mlflow.db"]
    address = f"sqlite:///{tmp_path}/my runs/mlflow.db"
    assert shlex.split(found["note"])[-2:] == ["--backend-store-uri", address]


def made_alone(folder):
    """Make what is not there, which two can't do at once."""

    def make():
        if not (folder / "tables").exists():
            time.sleep(0.2)
            (folder / "tables").touch(exist_ok=False)
        return True

    return one_at_a_time(make, folder)


def test_runs_that_begin_at_once_make_the_database_one_after_the_other(tmp_path):
    runs = [start_process(made_alone, tmp_path) for _ in range(3)]
    assert [pickle.loads(receiver.recv_bytes()) for _, receiver in runs] == [True] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["tables"]


def resumed_without_server(folder):
    """Why a run that goes on is not tracked while its server is down."""
    os.environ |= {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9"}
    os.environ |= {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    (folder / "mlflow.id").write_text("abc")
    with pytest.raises(Exception, match="API request") as error:
        open_tracker(folder, {}, 2)
    return str(error.value)


def test_a_server_that_is_down_is_no_reason_to_forget_the_run(tmp_path):
    code, said = run_alone(resumed_without_server, tmp_path)
    assert (code, "delete it" in said) == (0, False)


class MissingError(Exception):
    """What the library raises if a store has not what it is asked for."""

    error_code = "RESOURCE_DOES_NOT_EXIST"


@pytest.fixture
def server(monkeypatch):
    """The client of a server that somebody asks for."""
    library = Mock(MlflowException=MissingError)
    client = library.MlflowClient.return_value
    client.create_run.return_value.info.run_id = "abc"
    monkeypatch.setitem(sys.modules, "mlflow", library)
    monkeypatch.setitem(sys.modules, "mlflow.entities", Mock())
    monkeypatch.setattr(os, "environ", {"MLFLOW_TRACKING_URI": "https://example.com"})
    return client


def test_a_server_gets_no_report_which_has_images_and_paths(tmp_path, server):
    (tmp_path / "report.html").touch()
    open_tracker(tmp_path, {}, 0).finish(1, answers_of(("ant", "bee"), torch.eye(2).long()))
    server.log_image.assert_called_once()
    server.log_artifact.assert_not_called()


def test_a_server_has_a_run_in_the_experiment_that_is_asked_for_and_keeps_its_images(
    tmp_path, server
):
    os.environ |= {"MLFLOW_EXPERIMENT_NAME": "birds", "MLFLOW_HTTP_REQUEST_TIMEOUT": "60"}
    open_tracker(tmp_path, {}, 0).close(False)
    server.create_experiment.assert_called_once_with("birds", None)  # no folder of this machine
    server.get_experiment_by_name.assert_called_once_with("birds")
    server.set_terminated.assert_called_once_with("abc", "FAILED")
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "60"


def test_a_run_that_its_store_has_not_is_told_with_what_helps(tmp_path, server):
    (tmp_path / "mlflow.id").write_text("abc\n")
    open_tracker(tmp_path, {}, 2)
    server.update_run.assert_called_once_with("abc", status="RUNNING")
    server.update_run.side_effect = MissingError
    with pytest.raises(ValueError, match=r"mlflow\.id names no run of https://example\.com: del"):
        open_tracker(tmp_path, {}, 2)
    server.create_run.assert_not_called()


def has_imported(folder):
    """Whether a run without it has imported the library."""
    train(tiny(folder))
    return "mlflow" in sys.modules


def test_a_run_that_does_not_use_it_does_not_import_it(tmp_path):
    assert run_alone(has_imported, str(tmp_path / "run")) == (0, False)
