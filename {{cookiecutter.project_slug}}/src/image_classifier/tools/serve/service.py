"""A web service of a trained model: the bytes of an image in, its labels as JSON out.

It has no accounts, and listens to this machine alone.
"""

import asyncio
import io
import socket
import sys
from collections import deque
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from statistics import fmean
from time import monotonic
from typing import Any, TypeVar

import torch
from PIL import Image

from ...data import FORMATS
from ...errors import UserError
from ...extensions import function
from ...runtime.machine import num_cores
from ...runtime.platform import install_command
from ..python_api.api import load
from ..python_api.classifier import Classifier
from .command import ServeOptions

try:
    import uvicorn
    from fastapi import FastAPI, HTTPException, Query, Request
    from starlette.requests import ClientDisconnect
except ImportError as error:
    raise UserError(f"serve needs libraries: {install_command('fastapi', 'uvicorn')}") from error

T = TypeVar("T")

ADDRESS = "127.0.0.1"
MEASURED = 16  # images by whose time the wait of the next is estimated


def serve(options: ServeOptions) -> None:
    """Answer requests until the process is told to end.

    Raises:
        UserError: if there is no such run, a library is missing, or the port is in use.
    """
    try:
        listener = socket.create_server((ADDRESS, options.port))
    except OSError as error:
        raise UserError(f"--port {options.port}: {error.strerror}") from error
    with listener:
        model = load(options.run, device=options.device)
        workers = options.workers or num_cores()
        torch.set_num_threads(max(1, num_cores() // workers))
        app = build_app(model, options, workers)
        print(f"http://{ADDRESS}:{listener.getsockname()[1]}/predict: {model!r}", flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])


def build_app(model: Classifier, options: ServeOptions, workers: int) -> FastAPI:
    """The service: `GET /health` says what it serves, `POST /predict` labels the body."""
    app = FastAPI(title="image classifier", openapi_url=None)
    pool = ThreadPoolExecutor(workers)
    pending: set[Request] = set()  # whose image arrives, waits or is labeled
    took: deque[float] = deque(maxlen=MEASURED)  # seconds of the last images

    def label(*words: Any) -> dict[str, Any]:  # noqa: ANN401 - those of `label_image`
        began = monotonic()
        try:
            return label_image(*words)
        finally:
            took.append(monotonic() - began)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "classes": model.classes, "pending": len(pending)}

    @app.post("/predict")
    async def predict(request: Request, top_k: int = Query(5, ge=1)) -> dict[str, Any]:
        # Else, where more arrive than are labeled, each would wait until it is too late for it.
        ahead = max(0, len(pending) + 1 - workers)  # that are done before it has a worker
        is_known = len(took) == MEASURED  # the first ones are slow
        wait = fmean([*took]) * ahead / workers if is_known else 0.0
        if len(pending) >= workers + options.max_waiting or wait > options.max_seconds / 2:
            raise HTTPException(503, "too many requests at once", {"Retry-After": "1"})
        pending.add(request)
        try:
            content = await in_time(receive(request, options), options, 408)
        except BaseException:
            pending.discard(request)
            raise
        words = model, content, top_k, options.max_megapixels * 1e6
        job = asyncio.get_running_loop().run_in_executor(pool, label, *words)
        job.add_done_callback(lambda _: pending.discard(request))  # though nobody may wait any more
        job.add_done_callback(lambda it: it.cancelled() or it.exception())  # or asyncio prints it
        return await in_time(asyncio.shield(job), options, 503)

    return app


async def in_time(work: Awaitable[T], options: ServeOptions, status: int) -> T:
    """What `work` returns; an answer with `status` if it takes too long, or nobody waits for it."""
    try:
        return await asyncio.wait_for(work, options.max_seconds)
    except (TimeoutError, ClientDisconnect):
        raise HTTPException(status, f"not done within {options.max_seconds:g} s") from None


async def receive(request: Request, options: ServeOptions) -> bytes:
    """The body of a request, of which no more is kept than may be."""
    content = bytearray()
    async for part in request.stream():
        content.extend(part)
        if len(content) > options.max_megabytes * 1e6:
            raise HTTPException(413, f"more than {options.max_megabytes:g} MB")
    return bytes(content)


def label_image(
    model: Classifier, content: bytes, top_k: int, most_pixels: float
) -> dict[str, Any]:
    """The row of an image.

    Raises:
        HTTPException: with status 413 for one that is too large, 400 for one that can't be read.
    """
    if pixels_of(model, content) > most_pixels:
        raise HTTPException(413, f"more than {most_pixels / 1e6:g} megapixels")
    try:
        return model.predict(content, top_k)
    except UserError as error:  # it is damaged, or needs a tool
        reason = getattr(error, "reason", str(error))
        raise HTTPException(400, f"the image cannot be read: {reason}") from error


def pixels_of(model: Classifier, content: bytes) -> int:
    """How many pixels the header of an image file speaks of; 0 where it can't be read."""
    pixels = 0

    def note(height: int, width: int, _: int) -> None:
        nonlocal pixels
        pixels = height * width
        raise ValueError("that is all to know: nothing is decoded")

    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            return image.width * image.height
    except Image.DecompressionBombError:  # more than Pillow opens
        return sys.maxsize
    except Exception:  # Pillow raises many kinds; `predict` says what is wrong
        with suppress(Exception):  # so do libraries of arrays, if there is the tool
            function("decoder", "read_array")(content, model.trained.config.data.channels, note)
    return pixels
