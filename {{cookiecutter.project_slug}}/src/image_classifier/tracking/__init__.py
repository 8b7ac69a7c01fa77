"""What a run says of itself: log, trackers, GPU readings, bottleneck, FLOPs, sanity checks."""

from .logger import RunLogger
from .sanity_checks import check_setup
from .trackers import TRACKERS

__all__ = ["TRACKERS", "RunLogger", "check_setup"]
