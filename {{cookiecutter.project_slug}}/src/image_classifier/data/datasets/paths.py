"""Where the images of a dataset lie."""

import os
from array import array
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from ...errors import UserError

STAT_THREADS = 4  # no faster than one on a disk; on a network each waits for its own answer
STAT_TOGETHER = 4096  # files that a thread asks for between two looks at its queue


class PathList:
    """Paths as one array of bytes: forked workers share its memory, however often they read it.

    A Python list of strings would be copied into each worker by reference counting alone, a page
    at a time (https://github.com/pytorch/pytorch/issues/13246).
    """

    def __init__(self, root: str | Path, paths: Iterable[bytes | str | Path]) -> None:
        """Keep `paths`, which are relative to `root` and need not be valid text.

        Raises:
            UserError: if there are none.
        """
        self.root = Path(root)
        content, ends = bytearray(), array("q")
        for path in paths:  # which may be found as we go: millions are never a list
            content += os.fsencode(path)
            ends.append(len(content))
        if not ends:
            raise UserError(f"a PathList of no paths below {str(root)!a}: there should be an image")
        self.ends = torch.frombuffer(ends, dtype=torch.int64)
        self.bytes = torch.frombuffer(content, dtype=torch.uint8)

    def __len__(self) -> int:
        """How many paths there are."""
        return len(self.ends)

    def relative(self, index: int) -> bytes:
        """The path of image `index`, from `root`."""
        start = int(self.ends[index - 1]) if index else 0
        return self.bytes[start : int(self.ends[index])].numpy().tobytes()

    def between(self, first: int, last: int) -> list[bytes]:
        """The paths of the images from `first` up to, not including, `last`, from `root`."""
        ends = self.ends[max(0, first - 1) : last].tolist()
        ends = ends if first else [0, *ends]
        text = self.bytes[ends[0] : ends[-1]].numpy().tobytes()
        return [text[start - ends[0] : end - ends[0]] for start, end in pairwise(ends)]

    def picked(self, indices: Tensor) -> "PathList":
        """The paths at `indices` alone."""
        return PathList(self.root, [self.relative(index) for index in indices.tolist()])

    def __getitem__(self, index: int) -> Path:
        """The path of image `index`."""
        return self.root / os.fsdecode(self.relative(index))

    def stats(self) -> Tensor:
        """Size in bytes of each file and when it was changed, in ns: (count, 2) int64.

        Both are -1 for a file that is gone.
        """
        root = os.fsencode(self.root)

        def stats_from(first: int) -> Tensor:
            found = []
            for path in self.between(first, min(first + STAT_TOGETHER, len(self))):
                try:
                    status = os.stat(root + b"/" + path)
                    found.append((status.st_size, status.st_mtime_ns))
                except OSError:
                    found.append((-1, -1))
            return torch.tensor(found, dtype=torch.int64).view(-1, 2)

        with ThreadPoolExecutor(STAT_THREADS) as threads:
            return torch.cat(list(threads.map(stats_from, range(0, len(self), STAT_TOGETHER))))
