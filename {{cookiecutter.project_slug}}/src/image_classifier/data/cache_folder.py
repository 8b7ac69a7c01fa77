"""The folder for what tools make of a dataset's images."""

import hashlib
from pathlib import Path

from ..config import DataConfig
from ..errors import UserError

NO_CACHE = "off"  # as `data.cache`: read the files


def cache_folder(data: DataConfig) -> Path:
    """The folder for what tools keep of a dataset: `data.cache`, or ROOT.cache.

    That of a URL is in the working folder.

    Raises:
        UserError: if that is the root of a disk.
    """
    if data.cache not in ("", NO_CACHE):
        return Path(data.cache)
    if "://" in data.root:
        digest = hashlib.blake2b(data.root.encode(), digest_size=4).hexdigest()
        return Path(f"{data.root.rstrip('/').rpartition('/')[2]}-{digest}.cache")
    root = Path(data.root)
    if root.name in ("", ".."):
        root = root.resolve()
    if not root.name:
        raise UserError(f"--data.root {data.root!a} has nothing beside it: set --data.cache FOLDER")
    return root.with_name(f"{root.name}.cache")
