"""Images in tar shards as a list of paths: `train-000000.tar/ant/1.jpg`."""

import os
import zlib

import numpy as np
import torch
from torch import Tensor

from ...data import PathList
from .index import Index
from .storage import Storage


class Members(PathList):
    """Images in shards; those of shards elsewhere are fetched several at once."""

    def __init__(self, storage: Storage, index: Index, numbers: Tensor | None = None) -> None:
        """The images at `numbers` of an index, (count,) int64, or all."""
        self.storage = storage
        self.index = index
        self.numbers = torch.arange(len(index.arrays["label"])) if numbers is None else numbers
        places = (index.arrays[name][self.numbers].numpy() for name in ("shard", "start", "size"))
        self.shard, self.start, self.size = places
        folders = [os.fsencode(name) + b"/" for name, _, _ in index.shards]
        pairs = zip(self.shard.tolist(), index.names(self.numbers), strict=True)
        super().__init__(storage.root, (folders[shard] + name for shard, name in pairs))

    def read(self, index: int) -> bytes:
        """The content of image `index`, which `prefetch` of any list of them may have fetched."""
        ahead = getattr(self.storage.here().thread, "ahead", {}).get(int(self.numbers[index]))
        return self.fetch(index) if ahead is None else ahead.result()

    def fetch(self, index: int) -> bytes:
        """The content of image `index`."""
        name, _, _ = self.index.shards[self.shard[index]]
        return self.storage.read(name, int(self.start[index]), int(self.size[index]))

    def prefetch(self, indices: np.ndarray) -> None:
        """Begin to fetch what this thread reads next, if it is not on this machine."""
        if not self.storage.is_local:
            here = self.storage.here()
            wanted = dict(zip(self.numbers[indices].tolist(), indices.tolist(), strict=True))
            here.thread.ahead = {n: here.requests.submit(self.fetch, i) for n, i in wanted.items()}

    def picked(self, indices: Tensor) -> "Members":
        """Only the images at `indices`, (count,) int64."""
        return Members(self.storage, self.index, self.numbers[indices])

    def stats(self) -> Tensor:
        """Size in bytes of each image, and a digest of what changes with its shard."""
        stamps = torch.tensor([zlib.crc32(stamp.encode()) for _, _, stamp in self.index.shards])
        return torch.stack((torch.from_numpy(self.size), stamps[self.shard]), dim=1)
