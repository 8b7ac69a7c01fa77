"""Ray on this machine, for tools: without a dashboard, or a port that others reach."""

import os
import signal
from collections.abc import Mapping
from typing import Any

from ..errors import FaultError

# Ray reads these when it is imported.
VARIABLES = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # its servers listen on 127.0.0.1, on Linux too
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # or it warns
}
TRIES = 3  # it gives up after 30 s, which a busy machine may need


def prepare_ray(variables: Mapping[str, str]) -> None:
    """Tell Ray, before it is imported, what holds for all tools, and `variables`."""
    os.environ.update({**VARIABLES, **variables})


def start_ray(cores: int, **options: Any) -> None:  # noqa: ANN401 - of `ray.init`
    """Start Ray on this machine, with so many cores for its workers.

    Raises:
        FaultError: if it does not start.
    """
    import ray

    for tries_left in reversed(range(TRIES)):
        try:
            ray.init(address="local", num_cpus=cores, include_dashboard=False, **options)
            # As after Ctrl-C: Ray itself would end at once, with a report of a crash.
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            return
        except Exception as error:  # Ray raises no other type if the machine is too busy
            ray.shutdown()
            if not tries_left:
                raise FaultError(f"Ray did not start: {error}. What was saved is kept") from error
