"""The folder for what tools make of a dataset's images."""

from pathlib import Path

from ..config import DataConfig

NO_CACHE = "off"  # as `data.cache`: read the files


def cache_folder(data: DataConfig) -> Path:
    """The folder for what tools keep of a dataset: `data.cache`, or ROOT.cache."""
    if data.cache not in ("", NO_CACHE):
        return Path(data.cache)
    root = Path(data.root)
    if root.name in ("", ".."):
        root = root.resolve()
    return root.with_name(f"{root.name}.cache")
