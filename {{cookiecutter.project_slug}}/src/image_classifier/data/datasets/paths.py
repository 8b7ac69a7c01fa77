"""The paths of image files, and how these are read."""

import os
from array import array
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...errors import FaultError, UserError
from ...runtime.files import read_plain
from ..decode import BadImageError, decode_image, unreadable

STAT_THREADS = 4  # faster than one on network file systems
STAT_TOGETHER = 4096  # files per task of a thread


class PathList:
    """Paths as one array of bytes, whose memory forked workers share.

    Reference counts of a list would copy it into each worker
    (https://github.com/pytorch/pytorch/issues/13246). Where the images are not files of their own,
    paths are names, and a subclass has `read`, `stats`, `picked`, and perhaps `prefetch`.
    """

    def __init__(self, root: str | Path, paths: Iterable[bytes | str | Path]) -> None:
        """Keep `paths`, which are relative to `root` or absolute, and need not be valid text.

        Raises:
            UserError: if there are none.
        """
        self.root = Path(root)
        content = bytearray()
        ends = array("q")
        for path in paths:  # a generator of millions never becomes a list
            content += os.fsencode(path)
            ends.append(len(content))
        if not ends:
            raise UserError(f"a PathList of no paths below {str(root)!a}: there should be an image")
        self.ends = torch.frombuffer(ends, dtype=torch.int64)
        self.bytes = torch.frombuffer(content, dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> Path:
        return self.root / os.fsdecode(self.relative(index))

    def relative(self, index: int) -> bytes:
        """The path of image `index`, relative to `root`, or absolute."""
        start = int(self.ends[index - 1]) if index else 0
        return self.bytes[start : int(self.ends[index])].numpy().tobytes()

    def from_folder(self, folder: str | Path, index: int) -> bytes:
        """The path of image `index`, relative to `folder` if it is below it."""
        path = os.path.join(os.fsencode(self.root), self.relative(index))
        return path.removeprefix(os.path.join(os.fsencode(Path(folder)), b""))

    def read(self, index: int) -> bytes:
        """The content of file `index`; OSError if it can't be read."""
        return read_plain(self[index])

    def image(self, index: int, channels: int, bits: int) -> Tensor:
        """Image `index`, as `decode_image` has its pixels.

        Raises:
            BadImageError: if the file is missing, damaged, of another format or other channels, or
                too large.
            UserError: if the tool or the library for such files is missing.
            FaultError: if the system is out of memory or file descriptors.
        """
        try:
            return decode_image(self.read(index), channels, bits)
        except (BadImageError, FaultError):
            raise
        except UserError as error:
            raise UserError(f"{os.fspath(self[index])!a}: {error}") from error
        except Exception as error:  # of any kind: it is damaged
            raise unreadable(self[index], error) from error

    def prefetch(self, indices: np.ndarray) -> None:
        """Hear which files this thread reads next: (count,) int64."""

    def picked(self, indices: Tensor) -> "PathList":
        """Only the paths at `indices`, (count,) int64."""
        return PathList(self.root, self.relatives(indices))

    def relatives(self, indices: Tensor) -> Iterator[bytes]:
        """The paths at `indices`, (count,) int64, as `relative` has them."""
        content = memoryview(self.bytes.numpy())
        stops = self.ends[indices]
        starts = self.ends[indices - 1].where(indices > 0, 0)
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            yield content[start:stop].tobytes()

    def stats(self) -> Tensor:
        """Size in bytes and time of change in ns of each file, or -1: (count, 2) int64."""
        root = os.fsencode(self.root)

        def stats_of(part: Tensor) -> Tensor:
            found = []
            for path in self.relatives(part):
                try:
                    status = os.stat(os.path.join(root, path))
                    found.append((status.st_size, status.st_mtime_ns))
                except OSError:
                    found.append((-1, -1))
            return torch.tensor(found, dtype=torch.int64)

        with ThreadPoolExecutor(STAT_THREADS) as threads:
            parts = torch.arange(len(self)).split(STAT_TOGETHER)
            return torch.cat(list(threads.map(stats_of, parts)))
