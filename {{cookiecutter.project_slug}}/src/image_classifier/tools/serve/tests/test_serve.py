"""A service labels images as the command does, and bad requests neither stop nor fill it."""

import asyncio
import gc
import io
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from conftest import tiny, untrained_run, wait_for
from PIL import Image

from image_classifier.errors import UserError

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
httpx = pytest.importorskip("httpx")
pytest.importorskip("image_classifier.tools.python_api")

PROGRAM = """
import signal, sys
from image_classifier.cli import main
from image_classifier.runtime.platform import end_with_parent
end_with_parent(signal.SIGKILL)
sys.exit(main())
"""
LIMITS = "--port 0 --max-megabytes 0.3 --max-megapixels 0.5 --max-seconds 3 --device cpu"


@pytest.fixture(scope="module")
def run(photos, tmp_path_factory):
    return untrained_run(tiny(tmp_path_factory.mktemp("serve") / "run"), photos)


@contextmanager
def serving(run, *words):
    """A service, and a client of it."""
    command = [sys.executable, "-c", PROGRAM, "serve", run, *LIMITS.split(), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as service:
        try:
            line = next(line for line in service.stdout if "/predict" in line)
            address = re.search(r"http://127\.0\.0\.1:\d+", line)[0]
            with httpx.Client(base_url=address, timeout=60) as client:
                yield client
        finally:  # a test that fails would wait for it for ever
            service.terminate()
        assert service.wait(20) == -signal.SIGTERM


@pytest.fixture(scope="module")
def client(run):
    with serving(run) as client:
        yield client


def test_fifty_requests_at_once_are_all_answered_as_by_the_model(run, photos):
    with serving(run, "--max-seconds", "30") as client:  # as these cores may be busy
        assert_all_are_answered(client, run, photos)


def assert_all_are_answered(client, run, photos):
    """Fifty requests at once have the rows of the model."""
    from image_classifier import load

    paths = sorted(photos.rglob("*.jpg"))
    model = load(run)
    rows = {path: model.predict(path) | {"path": ""} for path in paths}

    def ask(path):
        answer = client.post("/predict", content=path.read_bytes())
        return path, answer.status_code, answer.json()

    with ThreadPoolExecutor(50) as pool:
        for path, status, row in pool.map(ask, (paths * 50)[:50]):
            assert status == 200
            assert row["label"] == rows[path]["label"]
            assert row["probability"] == pytest.approx(rows[path]["probability"], abs=1e-5)
            assert [*row] == [*rows[path]]
            assert len(row["top"]) == 2  # of five, if there were so many
    assert client.get("/health").json() == {
        "status": "ok",
        "classes": ["ant", "bee"],
        "pending": 0,
    }
    row = client.post("/predict?top_k=1", content=paths[0].read_bytes()).json()
    assert row["top"] == rows[paths[0]]["top"][:1]


def png(width, height):
    """A file of some hundred bytes, of black pixels."""
    file = io.BytesIO()
    Image.new("1", (width, height)).save(file, "PNG")
    return file.getvalue()


BAD = {
    "empty": (b"", 400, "the image cannot be read"),
    "text": (b"<script>alert(1)</script>", 400, "not a JPEG, PNG"),
    "a pickle": (b"\x80\x04cos\nsystem\n(S'true'\ntR.", 400, "not a JPEG, PNG"),
    "too many pixels": (png(1000, 1000), 413, "more than 0.5 megapixels"),
    "a bomb": (png(40_000, 40_000), 413, "more than 0.5 megapixels"),
    "too many bytes": (b"\xff\xd8\xff" + bytes(400_000), 413, "more than 0.3 MB"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_image_is_refused_and_the_next_is_labeled(client, photos, kind):
    content, status, said = BAD[kind]
    answer = client.post("/predict", content=content)
    assert (answer.status_code, said in answer.json()["detail"]) == (status, True), answer.text
    cut = (photos / "val/ant/12.jpg").read_bytes()
    assert "truncated" in client.post("/predict", content=cut[:900]).json()["detail"]
    assert client.post("/predict", content=cut).status_code == 200


def test_no_more_of_a_body_is_taken_than_an_image_may_have():
    from fastapi import HTTPException

    from image_classifier.tools.serve import command, service

    taken = []

    class Endless:
        async def stream(self):
            while len(taken) < 50:
                taken.append(1)
                yield bytes(10_000)

    options = command.ServeOptions("run", max_megabytes=0.25)
    with pytest.raises(HTTPException, match=r"more than 0\.25 MB"):
        asyncio.run(service.receive(Endless(), options))
    assert len(taken) == 26


def test_the_model_is_on_the_device_that_is_asked_for(monkeypatch):
    from image_classifier.tools.serve import command, service

    load = Mock(side_effect=UserError("no such run"))
    monkeypatch.setattr(service, "load", load)
    with pytest.raises(UserError):
        service.serve(command.ServeOptions("run", port=0, device="mps"))
    load.assert_called_once_with("run", device="mps")


def test_workers_are_as_many_as_asked_for_or_as_cores_and_share_these(monkeypatch):
    from image_classifier.tools.serve import command, service

    build = Mock()
    threads = Mock()
    for name, double in {"load": Mock(), "build_app": build, "uvicorn": Mock()}.items():
        monkeypatch.setattr(service, name, double)
    monkeypatch.setattr(service, "num_cores", lambda: 8)
    monkeypatch.setattr(service.torch, "set_num_threads", threads)
    for workers in (0, 2, 100):
        service.serve(command.ServeOptions("run", port=0, workers=workers))
    assert [call.args[2] for call in build.call_args_list] == [8, 2, 100]
    assert [call.args[0] for call in threads.call_args_list] == [1, 4, 1]


def test_a_file_of_a_format_that_no_dataset_has_is_not_opened():
    from image_classifier.tools.serve import service

    assert service.pixels_of(None, png(30, 20)) == 600
    file = io.BytesIO()
    Image.new("L", (30, 20)).save(file, "PCX")
    assert service.pixels_of(None, file.getvalue()) == 0


def test_a_file_that_needs_a_tool_is_refused_as_one_that_cannot_be_read():
    from fastapi import HTTPException

    from image_classifier.tools.serve import service

    model = Mock(predict=Mock(side_effect=UserError("pretuned add tiff")))
    with pytest.raises(HTTPException, match="400: the image cannot be read: pretuned add tiff"):
        service.label_image(model, b"", 5, 1e6)


def test_an_array_of_too_many_pixels_is_refused_before_it_is_decoded():
    from fastapi import HTTPException

    from image_classifier.tools.serve import service

    pytest.importorskip("image_classifier.tools.tiff")
    model = Mock(**{"trained.config.data.channels": 5})
    file = io.BytesIO()
    np.save(file, np.zeros((5, 30, 40), np.uint8))
    with pytest.raises(HTTPException, match=r"413: more than 0\.001 megapixels"):
        service.label_image(model, file.getvalue(), 5, 1000)
    assert not model.predict.called
    service.label_image(model, file.getvalue(), 5, 1200)
    assert model.predict.called


def slow():
    """An image that does not arrive in time."""
    yield b"\xff\xd8\xff"
    time.sleep(4)
    yield b"\0"


def test_an_image_that_does_not_arrive_is_given_up(client):
    assert client.post("/predict", content=slow()).status_code == 408


def test_a_client_that_goes_away_is_no_fault_of_the_service():
    from image_classifier.tools.serve import command, service

    app = service.build_app(Mock(classes=("ant",)), command.ServeOptions("run"), workers=1)
    asked = {"type": "http", "method": "POST", "path": "/predict", "query_string": b""}
    sent = []

    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    asyncio.run(app(asked | {"headers": []}, receive, send))  # raises nothing: no traceback
    assert sent[0]["status"] == 408


def test_an_image_that_is_not_labeled_in_time_keeps_its_place_until_it_is(caplog):
    from image_classifier.tools.serve import command, service

    class Slow:
        """Labels nothing until it may."""

        classes = ("ant",)

        def predict(self, content, _):
            may_end.wait(20)
            if content == b"1":
                raise UserError("it can't be read")
            return {}

    may_end = threading.Event()
    options = command.ServeOptions("run", max_seconds=0.3, max_waiting=0)
    app = service.build_app(Slow(), options, workers=1)

    async def ask():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            late = await client.post("/predict", content=b"1")
            assert "not done within 0.3 s" in late.json()["detail"]
            full = await client.post("/predict", content=b"2")
            assert "too many requests at once" in full.json()["detail"]
            may_end.set()
            while (await client.get("/health")).json()["pending"]:
                await asyncio.sleep(0.01)
            return late, full, await client.post("/predict", content=b"3")

    answers = asyncio.run(asyncio.wait_for(ask(), 20))
    assert [answer.status_code for answer in answers] == [503, 503, 200]
    gc.collect()
    assert "never retrieved" not in caplog.text  # a traceback for each such image


@pytest.mark.parametrize("num_bad", [0, 2])
def test_a_service_that_is_asked_for_twice_what_it_can_do_goes_on_doing_what_it_can(num_bad):
    from image_classifier.tools.serve import command, service

    def predict(content, _):
        if not content:
            raise UserError("it can't be read")  # at once
        time.sleep(0.05)
        return {}

    model = Mock(classes=("ant",), predict=predict)
    options = command.ServeOptions("run", max_seconds=0.5)
    app = service.build_app(model, options, workers=1)

    async def ask_often():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            asked = []
            for _ in range(140):  # in 3.5 s, of which the queue fills in one
                for content in (b"1", *[b""] * num_bad):
                    asked.append(asyncio.create_task(client.post("/predict", content=content)))
                await asyncio.sleep(0.025)
            answers = await asyncio.gather(*asked)
            return [answer.status_code for answer in answers[:: 1 + num_bad]]

    codes = asyncio.run(ask_often())
    assert codes[100:].count(200) >= 10  # of 20 that it could label meanwhile


def test_as_many_may_wait_as_all_workers_together_can_label_in_time():
    from image_classifier.tools.serve import command, service

    at_once = []
    most = []

    def predict(*_):
        at_once.append(1)
        most.append(len(at_once))
        time.sleep(0.05)
        at_once.pop()
        return {}

    model = Mock(classes=("ant",), predict=predict)
    app = service.build_app(model, command.ServeOptions("run", max_seconds=2), workers=4)

    async def ask():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            for count in (service.MEASURED, 44):  # the first tell how long one takes
                asked = [client.post("/predict", content=b"1") for _ in range(count)]
                answers = await asyncio.gather(*asked)
            return {answer.status_code for answer in answers}

    assert asyncio.run(ask()) == {200}
    assert max(most) == 4


def test_paths_and_other_methods_lead_nowhere(client):
    assert client.get("/predict").status_code == 405
    assert client.get("/..%2f..%2fetc/passwd").status_code == 404
    assert client.get("/openapi.json").status_code == 404
    assert client.post("/predict?top_k=0", content=b"").status_code == 422


def test_what_a_busy_service_has_no_place_for_is_told_to_come_back(run, photos):
    content = (photos / "val/ant/12.jpg").read_bytes()
    ask = lambda _: client.post("/predict", content=content)  # noqa: E731
    with (
        serving(run, "--workers", "1", "--max-waiting", "0") as client,
        ThreadPoolExecutor(20) as p,
    ):
        answers = list(p.map(ask, range(60)))
        assert {answer.status_code for answer in answers} == {200, 503}
        busy = next(answer for answer in answers if answer.status_code == 503)
        assert busy.headers["retry-after"] == "1"
        assert ask(None).status_code == 200
        stalled = p.submit(client.post, "/predict", content=slow())  # has the only place
        wait_for(lambda: client.get("/health").json()["pending"])
        assert ask(None).status_code == 503
        assert stalled.result().status_code == 408
        assert ask(None).status_code == 200


def test_it_is_heard_by_this_machine_alone(client):
    port = client.base_url.port
    listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    local = [row[1] for row in listening if row[3] == "0A"]  # that listen
    assert f"0100007F:{port:04X}" in local
    assert f"00000000:{port:04X}" not in local


def test_a_run_that_is_not_there_or_a_port_in_use_is_a_line(run, refusal, client, tmp_path):
    assert "there is no checkpoint" in refusal("serve", tmp_path / "gone", "--port", 0)
    port = client.base_url.port
    assert f"--port {port}: Address already in use" in refusal("serve", run, "--port", port)
