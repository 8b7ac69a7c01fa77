"""What a run says of itself: log, trackers, device readings, bottleneck, FLOPs, sanity checks."""

from .logger import RunLogger
from .sanity_checks import RunSetup, check_setup
from .trackers import TRACKERS

__all__ = ["TRACKERS", "RunLogger", "RunSetup", "check_setup"]
