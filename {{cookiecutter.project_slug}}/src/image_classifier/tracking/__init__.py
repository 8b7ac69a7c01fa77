"""What a run says of itself: its log, which tells trackers and observers, and errors at its start.

A tracker of yours needs `Tracker`, `Knobs` and `PROJECT`, the name that groups the runs; an
observer `Observer`, `Setup`, `Speed` and `Result`; a watcher `Setup`. All of them are tools.
"""

from .checks import blank_logits, check_same_classes, check_setup, only_logits
from .logger import RunLogger
from .observers import Observer, Result, Setup, Speed, open_observers
from .trackers import PROJECT, Knobs, Metrics, Tracker
