"""From files to batches on the device. Other rooms import only what is named here.

To train and to evaluate: `TrainData` and `EvalData`, which yield a `Batch` each. To add a dataset:
a function in `datasets/` that returns a `Source` or a torch `Dataset`, and its name in `DATASETS`.
"""

from .autotune import choose_workers, fits_device, fits_host, open_loader, worker_counts
from .crops import BOX_DRAWS, center_crop, random_boxes, resize
from .datasets import DATASETS, open_dataset, open_files, prepared
from .datasets.folder import has_suffix, walk
from .datasets.paths import PathList
from .datasets.prepared import Recipe, cache_folder
from .datasets.quarantine import quarantine_path, read_quarantine
from .datasets.source import Source, are_replaced
from .decode import BadImageError, read_image
from .gather import Windows, reflect, shift_and_flip
from .loader import Batch, EvalData, Prefetcher, TrainData
from .samples import LEFT_OUT, Samples

__all__ = [
    "BOX_DRAWS",
    "DATASETS",
    "LEFT_OUT",
    "BadImageError",
    "Batch",
    "EvalData",
    "PathList",
    "Prefetcher",
    "Recipe",
    "Samples",
    "Source",
    "TrainData",
    "Windows",
    "are_replaced",
    "cache_folder",
    "center_crop",
    "choose_workers",
    "fits_device",
    "fits_host",
    "has_suffix",
    "open_dataset",
    "open_files",
    "open_loader",
    "prepared",
    "quarantine_path",
    "random_boxes",
    "read_image",
    "read_quarantine",
    "reflect",
    "resize",
    "shift_and_flip",
    "walk",
    "worker_counts",
]
