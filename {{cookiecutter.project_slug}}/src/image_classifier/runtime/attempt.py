"""A command's work, in the processes that it needs: again where that helps, and how it ended."""

import faulthandler
import gc
import os
import sys
import time
import traceback
from collections.abc import Callable

from ..config import ComputeConfig, FaultError, RunConfig, UserError
from .printable import printable

# Exit codes. Of some faults they are others, which their classes know.
DONE, FAULT, MISTAKE, INTERRUPTED = 0, 1, 2, 130
# What says that this is not the first start of a job: ours, torchrun's, SLURM's.
RESTARTS = ("RUN_RESTARTS", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


def run_in_processes(work: Callable[[], None], run: RunConfig, compute: ComputeConfig) -> int:
    """Do `work` here, or in as many processes as the config asks for; return the exit code."""
    from .distributed import AGAIN
    from .launch import is_launched, launch, num_processes

    if is_launched():
        return attempt(work)
    processes = num_processes(run, compute)
    if processes > 1:
        return launch(processes)
    while (code := attempt(work)) == AGAIN:
        os.environ[RESTARTS[0]] = "1"
        gc.collect()  # what failed may be in reference cycles, with all that it holds
    return code


def attempt(work: Callable[[], None]) -> int:
    """Do `work` and return the exit code; what goes wrong is told."""
    from .distributed import is_peer_failure

    rank = os.environ.get("RANK")
    if not faulthandler.is_enabled():
        faulthandler.enable(2)  # standard error; says the line of a crash in somebody's C
    try:
        work()
    except FaultError as fault:
        if str(fault):  # empty where another rank says it
            line = printable(str(fault))
            print(f"rank {rank}: {line}" if rank else line, file=sys.stderr)
        return fault.code
    except UserError:
        raise
    except Exception as error:
        from .machine import advice_on

        account = traceback.format_exc()
        if is_peer_failure(error):
            time.sleep(3)  # until the rank that has gone has said why, and all are stopped
            account = "the connection to another rank is lost"
        # In one piece, so that the accounts of several ranks do not mix.
        where = f" on rank {rank}" if rank else ""
        print(f"{account}\nfailed{where}{advice_on(error)}", file=sys.stderr)
        return FAULT
    return DONE
