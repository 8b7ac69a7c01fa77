"""From files to batches on the device. Other rooms import only what is named here.

To train and to evaluate: `TrainData` and `EvalData`, which yield a `Batch` each. To add a dataset:
a function in `datasets/` that returns a `Source`, and its name in `DATASETS`.
"""

from .arrays import COLORED, dtype_of, fitted, take, wrong_channels
from .autotune import fits_memory, open_loader
from .batch import Augmented, Batch, prefetched
from .cache_folder import NO_CACHE, cache_folder
from .crops import BOX_DRAWS, crop, fit_square, largest_box, mean_color, random_sides, resize
from .datasets import DATASETS, open_dataset, open_files
from .datasets.folder import ALL, NoLabelsError, WrapperError, are_in_folders, find_folders
from .datasets.listing import NO_CLASS, class_folders, has_suffix, is_junk, listing, show, walk
from .datasets.parts import ROLES, check_own, divide, find_name, find_parts, look, part_of, role_of
from .datasets.paths import PathList
from .datasets.source import Source, are_replaced
from .decode import FORMATS, NPY, BadImageError, decode_image, image_pixels, simplejpeg, unreadable
from .gather import reflect, shift_and_flip
from .loader import EvalData, TrainData
from .samples import LEFT_OUT, Note, Samples
from .worker_count import worker_counts
