"""A line on how far a command is."""

import sys
import time

from .console import clock, say


class Progress:
    """A line on how far a command is: each half second on a terminal, each 10 s in a log."""

    def __init__(self, total: int, done: int = 0) -> None:
        """Of `total` images, `done` are done already."""
        self.total = total
        self.first = done
        self.began = self.said = time.monotonic()

    def show(self, done: int) -> None:
        """Print the line, if it is time for it."""
        now = time.monotonic()
        is_live = sys.stdout.isatty()
        if done > self.first and now - self.said > (0.5 if is_live else 10):
            self.said = now
            rate = (done - self.first) / (now - self.began)
            line = f"{done:,} of {self.total:,} images, {rate:,.0f} images/s"
            say(f"{line}, ETA {clock((self.total - done) / rate)}", is_last=not is_live)
