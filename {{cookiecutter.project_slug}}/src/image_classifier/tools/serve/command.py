"""`serve`: label images over HTTP."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from ...errors import EXIT_DONE
from ...extensions import within
from ...runtime.command_line import command, parse, summary
from ...runtime.launch import attempt


@dataclass(frozen=True)
class ServeOptions:
    """What to serve, to whom, and the limits of a request."""

    run: Annotated[str, tyro.conf.Positional]  # run folder, or a checkpoint in one
    port: int = within(8000, 0, 65535)  # on 127.0.0.1; 0: any free port
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto: an accelerator if there is one
    workers: int = within(0, 0, 1024)  # images at a time; 0: as many as cores
    max_waiting: int = within(100, 0)  # requests that wait for a worker; others get status 503,
    # and so do those that would wait for half of `max_seconds`
    max_megabytes: float = within(10.0, 0.001, 1000)  # largest image file; else status 413
    max_megapixels: float = within(25.0, 0.001, 64)  # largest image; else status 413
    max_seconds: float = within(10.0, 0.01, 3600)  # to receive an image, and to label it


def main(words: list[str]) -> int:
    """Label images over HTTP: `serve RUN`, then `curl --data-binary @x.jpg .../predict`."""
    options = parse(ServeOptions, words, prog=command("serve"), about=summary(main))

    def work() -> None:
        from .service import serve

        serve(options)

    return attempt(work) or EXIT_DONE
