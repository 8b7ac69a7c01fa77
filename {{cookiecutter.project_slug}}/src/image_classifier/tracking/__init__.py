"""What a run says of itself: log, trackers, GPU readings, bottleneck, FLOPs, sanity checks.

A tracker of yours needs `Tracker`, `Knobs` and `PROJECT`, the name that groups the runs.
"""

from .logger import RunLogger
from .sanity_checks import check_setup
from .trackers import PROJECT, Knobs, Tracker

__all__ = ["PROJECT", "Knobs", "RunLogger", "Tracker", "check_setup"]
