"""Unreadable images are skipped, counted and listed in the run folder.

    flower/12.jpg<TAB>image file is truncated (3 bytes not processed)

Paths are escaped as in the list of `check --quarantine`. All processes of a run share the list.
"""

import contextlib
import os
from functools import cached_property
from pathlib import Path
from threading import Lock

from ...config import DataConfig
from ...data import Note, Source
from ...errors import FaultError
from ...runtime.console import printable_path
from ...runtime.run_dir import BAD_IMAGES

MOST, MOST_SHARE = 20, 0.01  # images or share of a split that may be bad, whichever is more
CURE = "train without them: --data.on-bad-image skip"


def open_note(source: Source, data: DataConfig, folder: str) -> Note | None:
    """What to call with the index of an unreadable image and the reason; None to stop there."""
    return BadImages(source, data, folder).note if data.on_bad_image == "skip" else None


class BadImages:
    """The unreadable images of a split that this process and those with the same list have met."""

    def __init__(self, source: Source, data: DataConfig, folder: str) -> None:
        """List those of `source` in the run folder `folder`, if it is not empty."""
        self.source = source
        self.root = Path(data.root)
        self.path = Path(folder) / BAD_IMAGES if folder else None
        self.most = max(MOST, int(MOST_SHARE * len(source)))
        self.indices: set[int] = set()  # of those that this process has met
        self.names: set[bytes] = set()  # these, and what was read of the list
        self.end = 0  # how much, in bytes
        self.lock = Lock()  # for threads that load images
        self.earlier = {*self.known()}  # listed by an earlier start: they may be readable now

    def note(self, index: int, reason: str) -> None:
        """Count and list image `index`, once.

        Raises:
            FaultError: if too many images are bad.
        """
        with self.lock:
            if index in self.indices:
                return
            self.indices.add(index)
            if (name := self.name(index)) not in self.known() and self.path:
                # A full disk is no reason to stop.
                with contextlib.suppress(OSError), self.path.open("ab") as file:
                    file.write(name + b"\t" + reason.encode() + b"\n")
            self.names.add(name)
            self.earlier.discard(name)
            met = self.names - self.earlier
            count = 0 if len(met) <= self.most else len(met & self.of_split)
        if count > self.most:
            where = f"; {os.fspath(self.path)!a} lists them" if self.path else ""
            raise FaultError(f"{count} of {len(self.source)} images can't be read{where}")

    @cached_property
    def of_split(self) -> set[bytes]:
        """The names of all images of the split: the list has those of others, too."""
        return {self.name(index) for index in range(len(self.source))}

    def known(self) -> set[bytes]:
        """The names of all bad images; those of other processes and splits, if they are listed."""
        if self.path and self.path.exists():
            with self.path.open("rb") as file:  # only what is new, in whole lines
                file.seek(self.end)
                lines, newline, _ = file.read().rpartition(b"\n")
            self.end += len(lines + newline)
            self.names.update(line.partition(b"\t")[0] for line in lines.splitlines())
        return self.names

    def name(self, index: int) -> bytes:
        """The image on the list: its path below `data.root`, or its number."""
        if self.source.paths is None:
            return self.source.name(index).encode()
        return printable_path(self.source.paths.from_folder(self.root, index)).encode()
