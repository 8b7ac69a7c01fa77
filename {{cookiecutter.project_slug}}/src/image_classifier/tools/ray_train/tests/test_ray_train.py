"""A run in the workers of Ray."""

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from conftest import changed, losses

from image_classifier.cli import main
from image_classifier.errors import UserError
from image_classifier.runtime import launch
from image_classifier.tools.ray_train import cluster
from image_classifier.train import train

LR = 0.0003  # at a larger one, the rounding of sums over ranks grows a thousandfold in ten steps
TINY = "smoke --epochs 12 --data.limit 64 --data.batch-size 16 --run.trackers"
TINY += f" --optim.warmup-epochs 1 --optim.lr {LR} --run.dir"


def test_a_run_in_workers_of_ray_survives_the_kill_of_one_and_learns_as_one_process(
    config, tmp_path, monkeypatch
):
    pytest.importorskip("ray.train")
    monkeypatch.setenv("HOME", str(tmp_path))  # where Ray writes its token
    folder, output = tmp_path / "in ray", tmp_path / "output"
    program = f"import sys; from {main.__module__} import main; sys.exit(main())"
    words = [sys.executable, "-c", program, "ray-train", *TINY.split(), str(folder)]
    with output.open("wb") as file:
        driver = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT)
    try:
        while not (folder / "checkpoints" / "last.pt").exists():
            assert driver.poll() is None, output.read_text()
            time.sleep(0.01)
        # "process 123 on host": the worker of rank 0
        os.kill(int((folder / ".lock").read_text().split()[1]), signal.SIGKILL)
        assert driver.wait(600) == 0, output.read_text()
    finally:
        driver.kill()
    said = output.read_text()
    assert "the worker of rank 0 was lost" in said
    starts = [line for line in said.splitlines() if ": from step" in line]
    assert ["from step 0 of 48" in line for line in starts] == [True, False]
    train(changed(config, epochs=12, optim__lr=LR))
    assert losses(folder) == pytest.approx(losses(config.run.dir), rel=1e-3)
    reported = [*folder.glob("ray/checkpoint_*/run.json")]
    assert reported
    assert str(folder) in reported[0].read_text()


def test_a_time_limit_counts_from_the_start_of_a_worker(tmp_path, monkeypatch):
    name = "image_classifier.tools.ray_train.ray_train"
    training = pytest.importorskip(name)
    monkeypatch.setenv(launch.BEGAN, "0")  # so that it is as before at the end
    monkeypatch.delenv(launch.BEGAN)
    monkeypatch.chdir(tmp_path)
    spent = []

    def work(_):
        time.sleep(0.1)  # images, a compilation
        spent.append(launch.seconds_since_start())

    monkeypatch.setattr(training, "train", work)
    monkeypatch.setattr(training.watcher, "is_worker", False)
    assert training.train_in_worker({"config": None, "folder": str(tmp_path)}) == 0
    assert spent[0] >= 0.1


def test_ray_on_this_machine_is_for_this_user_alone(monkeypatch):
    ray, tokens, at_exit = Mock(), set(), []
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(cluster.signal, "signal", Mock())
    monkeypatch.setattr(cluster.atexit, "register", lambda *words, **_: at_exit.append(words))
    monkeypatch.setattr(os, "environ", {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "a"})
    for _ in range(2):
        cluster.prepare_ray({"RAY_OTHER": "1"})
        assert (os.environ["RAY_AUTH_MODE"], os.environ["RAY_OTHER"]) == ("token", "1")
        assert os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"  # on 127.0.0.1 alone
        tokens.add(os.environ["RAY_AUTH_TOKEN"])
    assert len(tokens - {"a"}) == 2
    cluster.start_ray(2, log_to_driver=False)
    given = ray.init.call_args.kwargs
    folder = Path(given["_temp_dir"]).parent  # Ray gives its own to everybody
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert given["include_dashboard"] is False
    ((remove, place),) = at_exit
    remove(place)
    assert not folder.exists()


def test_more_workers_than_gpus_are_refused_before_ray_waits_for_them(config, monkeypatch):
    name = "image_classifier.tools.ray_train.ray_train"
    training = pytest.importorskip(name)
    ray, trainer = Mock(), Mock()
    ray.cluster_resources.return_value = {"CPU": 8.0, "GPU": 1.0}
    trainer().fit().return_value = 0
    monkeypatch.setattr(training, "start", lambda *_: None)
    monkeypatch.setattr(training, "ray", ray)
    monkeypatch.setattr(training, "TorchTrainer", trainer)
    with pytest.raises(UserError, match="2 need as many GPUs; there are 1: --workers 1, or"):
        training.ray_train(config, 2, 0, 3, "local")
    ray.shutdown.assert_called_once()
    on_cpu = changed(config, compute__device="cpu")
    for own, workers, address in ((config, 1, "local"), (on_cpu, 2, "local"), (config, 2, "auto")):
        assert training.ray_train(own, workers, 0, 3, address) == 0  # a cluster may grow
    uses = [call.kwargs["scaling_config"].use_gpu for call in trainer.call_args_list[1:]]
    assert uses == [True, False, True]


def test_without_ray_a_line_says_what_to_install(refusal, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    name = main.__module__.replace("cli", "tools.ray_train.ray_train")
    monkeypatch.delitem(sys.modules, name, raising=False)
    assert "pip install 'ray[train]" in refusal("ray-train", "smoke")


def test_the_number_of_workers_has_one_option(refusal):
    assert "--workers" in refusal("ray-train", "smoke", "--run.processes", "3")
