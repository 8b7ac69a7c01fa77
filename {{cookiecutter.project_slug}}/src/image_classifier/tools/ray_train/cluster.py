"""Ray on this machine: without a dashboard, for this user alone.

Its ports are those of 127.0.0.1, which other users of the machine reach: they need a token. What it
writes and its sockets are in a folder that only this user can enter.
"""

import atexit
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ...errors import FaultError

# Ray reads these when it is imported.
VARIABLES = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # its servers listen on 127.0.0.1, on Linux too
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # or it warns
}
# The path of a socket may have 107 bytes, and TMPDIR may be long.
SHORT_FOLDER = "/tmp" if os.path.isdir("/tmp") else None  # noqa: S108 - `mkdtemp` makes its own
TRIES = 3  # it gives up after 30 s, which a busy machine may need


def prepare_ray(variables: Mapping[str, str]) -> None:
    """Tell Ray, before it is imported, what always holds, and `variables`.

    The token is for this command and its workers; other processes of the user may read it.
    """
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    os.environ.update({**VARIABLES, **token, **variables})


def start_ray(cores: int, **options: Any) -> None:  # noqa: ANN401 - of `ray.init`
    """Start Ray on this machine, with so many cores for its workers.

    Raises:
        FaultError: if it does not start.
    """
    import ray

    forget_token()
    # Ray makes its own folder writable for everybody: that is in one of mode 0700.
    folder = tempfile.mkdtemp(prefix="ray-", dir=SHORT_FOLDER)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    options = {"include_dashboard": False, "_temp_dir": f"{folder}/t", **options}
    for tries_left in reversed(range(TRIES)):
        try:
            ray.init(address="local", num_cpus=cores, **options)
            # As after Ctrl-C: Ray itself would end at once, with a report of a crash.
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            return
        except SystemExit as error:  # Ray's own handler of SIGTERM raises it as it starts
            raise KeyboardInterrupt from error
        except Exception as error:  # Ray raises no other type if the machine is too busy
            ray.shutdown()
            if not tries_left:
                raise FaultError(f"Ray did not start: {error}. What was saved is kept") from error


def forget_token() -> None:
    """Have Ray read its variables again, if this process has imported or started it before."""
    with suppress(ImportError, AttributeError):  # no part of its interface: other versions differ
        from ray._raylet import AuthenticationTokenLoader, Config

        Config.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()
