"""From files to batches on the device. Other rooms import only what is named here.

To train and to evaluate: `TrainData` and `EvalData`, which yield a `Batch` each. To add a dataset:
a function in `datasets/` that returns a `Source` or a torch `Dataset`, and its name in `DATASETS`.
"""

from .autotune import MEMORY_SHARE, choose_depth, choose_workers, fits_device, worker_counts
from .crops import BOX_DRAWS, centre_crop, random_boxes, resize
from .datasets import DATASETS, open_dataset, open_files
from .datasets.folder import has_suffix, skipped_files, splits_of, walk
from .datasets.paths import PathList
from .datasets.prepared import OFF, Recipe, cache_folder
from .datasets.quarantine import (
    format_quarantine,
    path_from_root,
    quarantine_path,
    read_quarantine,
)
from .datasets.source import (
    READ_FILES,
    Source,
    are_replaced,
    check_numbers,
    difference,
)
from .decode import (
    FORMATS,
    ORIENTATION,
    BadImageError,
    highest_grey,
    highest_in_file,
    is_dark,
    read_image,
    scale_of_grey,
)
from .gather import Windows, reflect, shift_and_flip
from .loader import Batch, CopyAhead, EvalData, TrainData, pins
from .prepare import prepare_images
from .samples import LEFT_OUT, Samples
from .shared_memory import PART_SIZES, SharedMemoryLoader

__all__ = [
    "BOX_DRAWS",
    "DATASETS",
    "FORMATS",
    "LEFT_OUT",
    "MEMORY_SHARE",
    "OFF",
    "ORIENTATION",
    "PART_SIZES",
    "READ_FILES",
    "BadImageError",
    "Batch",
    "CopyAhead",
    "EvalData",
    "PathList",
    "Recipe",
    "Samples",
    "SharedMemoryLoader",
    "Source",
    "TrainData",
    "Windows",
    "are_replaced",
    "cache_folder",
    "centre_crop",
    "check_numbers",
    "choose_depth",
    "choose_workers",
    "difference",
    "fits_device",
    "format_quarantine",
    "has_suffix",
    "highest_grey",
    "highest_in_file",
    "is_dark",
    "open_dataset",
    "open_files",
    "path_from_root",
    "pins",
    "prepare_images",
    "quarantine_path",
    "random_boxes",
    "read_image",
    "read_quarantine",
    "reflect",
    "resize",
    "scale_of_grey",
    "shift_and_flip",
    "skipped_files",
    "splits_of",
    "walk",
    "worker_counts",
]
