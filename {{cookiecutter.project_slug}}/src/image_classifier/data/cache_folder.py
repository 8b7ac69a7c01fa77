"""The folder for what tools make of a dataset's images."""

import hashlib
from pathlib import Path

from ..config import DataConfig

NO_CACHE = "off"  # as `data.cache`: read the files


def cache_folder(data: DataConfig) -> Path:
    """The folder for what tools keep of a dataset: `data.cache`, or ROOT.cache.

    That of a URL is in the working folder.
    """
    if data.cache not in ("", NO_CACHE):
        return Path(data.cache)
    if "://" in data.root:
        digest = hashlib.blake2b(data.root.encode(), digest_size=4).hexdigest()
        return Path(f"{data.root.rstrip('/').rpartition('/')[2]}-{digest}.cache")
    root = Path(data.root)
    if root.name in ("", ".."):
        root = root.resolve()
    return root.with_name(f"{root.name}.cache")
