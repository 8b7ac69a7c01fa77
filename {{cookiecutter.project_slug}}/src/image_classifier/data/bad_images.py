"""Images that can't be read: they end the run, or are skipped, counted and listed in its folder.

    flower/12.jpg<TAB>image file is truncated (3 bytes not processed)

Paths are relative to `data.root`, and what can't be printed of them is escaped, as in the list of
`check --quarantine`: a line is a line of text whatever a file is called. It is added by one write,
as several processes share the list.
"""

import contextlib
import os
from pathlib import Path
from threading import Lock

from ..config import DataConfig
from ..errors import FaultError
from ..runtime.console import printable_path
from .datasets.source import Source
from .decode import BadImageError

LIST = "bad_images.txt"
MOST, MOST_SHARE = 20, 0.01  # of the images of a split, whichever is more, may be bad


class BadImages:
    """The images of a split that can't be read, as far as this process has met them."""

    def __init__(self, source: Source, data: DataConfig, folder: str) -> None:
        """Of `source`; they are listed in the run folder `folder`, or nowhere if it is empty."""
        self.source, self.root = source, Path(data.root)
        self.is_skipping = data.on_bad_image == "skip"
        self.path = Path(folder) / LIST if folder else None
        self.most = max(MOST, int(MOST_SHARE * len(source)))
        self.reasons: dict[int, str] = {}  # by index
        self.listed: set[bytes] = set()  # paths that the list has, of other processes' too
        self.read_bytes = 0  # of the list
        self.lock = Lock()  # threads that load images come here, too

    def note(self, index: int, reason: str) -> None:
        """Count and list image `index`, once.

        Each process counts those that it meets itself, which are all of them in some epochs.

        Raises:
            BadImageError: if bad images are not to be skipped.
            FaultError: if too many are bad to go on without them.
        """
        if not self.is_skipping:
            raise BadImageError(self.source.name(index), reason)
        if index in self.reasons:
            return
        with self.lock:
            self.reasons[index] = reason
            self.write_list()
        if len(self.reasons) > self.most:
            where = f"; {os.fspath(self.path)!a} lists them" if self.path else ""
            raise FaultError(
                f"{len(self.reasons)} of {len(self.source):,} images can't be read, more than "
                f"{self.most}, which is as many as are skipped{where}. The last: {reason}"
            )

    def count(self) -> int:
        """How many files the list has by now; those that are missing in it are added."""
        with self.lock:
            self.write_list()
        return max(len(self.listed), len(self.reasons))

    def write_list(self) -> None:
        """Add what is not in the list yet, after what other processes have added is read."""
        if self.path is None or not (self.reasons or self.path.exists()):
            return
        # A disk that is full is no reason to stop: the count is still told.
        with contextlib.suppress(OSError), self.path.open("ab+") as file:
            # Windows has no such locks, nor have some file systems on a network.
            with contextlib.suppress(ImportError, OSError):
                import fcntl

                fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file.fileno()).st_size < self.read_bytes:  # --run.fresh has deleted it
                self.listed, self.read_bytes = set(), 0
            file.seek(self.read_bytes)
            text = file.read()
            self.listed |= {line.partition(b"\t")[0] for line in text.splitlines()}
            lines = {self.name(index): reason for index, reason in self.reasons.items()}
            new = [name for name in lines if name not in self.listed]
            added = b"".join(name + b"\t" + lines[name].encode() + b"\n" for name in new)
            if added:
                os.write(file.fileno(), added)
            self.listed.update(new)
            self.read_bytes += len(text) + len(added)

    def name(self, index: int) -> bytes:
        """An image as the list has it: the path of its file, or its number."""
        if self.source.paths is None:
            return self.source.name(index).encode()
        path = os.path.relpath(self.source.paths[index], self.root)
        return printable_path(os.fsencode(path)).encode()

    def metrics(self) -> dict[str, float]:
        """What is logged: how many there are, if any."""
        count = self.count()
        return {"data/bad_images": count} if count else {}

    def told(self) -> str:
        """A line that says how many there are; empty if there are none."""
        count = self.count()
        images = "1 image" if count == 1 else f"{count:,} images"
        where = f": {self.path}" if self.path else ""
        return f"{images} could not be read and were skipped{where}" if count else ""
