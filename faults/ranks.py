"""Signals, and ranks that die or hang, alone and under both launchers."""

import contextlib
import os
import signal
import tempfile
import time
from functools import partial
from pathlib import Path

from image_classifier.config import Config
from image_classifier.errors import UserError

from .children import (
    FAST,
    Command,
    assert_same_end,
    expect,
    fork,
    kill_group,
    losses,
    small,
    status,
    train,
    train_whole,
    wait,
)
from .table import LossError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
LONGEST_SECONDS = 10.0  # from a signal to the end of the run
LONG = f"{FAST} --run.dir run --epochs 2000 --run.evaluate-every-epochs 100"
LONG += " --run.log-every-steps 1"
SHORT = f"{FAST} --run.dir run --epochs 8 --run.evaluate-every-epochs 0.7"
SHORT += " --run.log-every-steps 1"
TORCHRUN = "-m torch.distributed.run --nproc-per-node 2 --max-restarts 3"
TORCHRUN += " --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGUSR1"
HUNG_SECONDS = 5


def signal_alone(scratch: Path, tries: int) -> str:
    """Send each signal to a run of one process; continue it, and compare."""
    unbroken = small(scratch / "unbroken", epochs=20)
    took = train_whole(unbroken)
    longest, num_interrupted = 0.0, 0
    for number in range(tries):
        sent = SIGNALS[number % len(SIGNALS)]
        config = small(scratch / f"run{number}", epochs=20)
        folder = Path(config.run.dir)
        pid = fork(train, config)
        while not (folder / "status.json").exists():
            time.sleep(0.01)
        time.sleep(0.05 + 0.4 * took * number / tries)
        began = time.monotonic()
        os.kill(pid, sent)
        wait(pid)
        longest = max(longest, time.monotonic() - began)
        if status(folder)["state"] == "interrupted":
            num_interrupted += 1
            expect(status(folder)["signal"] == sent.name, "another signal is told")
        train_whole(config)
        assert_same_end(folder, Path(unbroken.run.dir))
    check_time(longest)
    expect(num_interrupted > tries / 2, f"only {num_interrupted} came before the end of the run")
    return (
        f"{num_interrupted} came before the end of the run; at most {longest:.1f} s to its end; "
        "continued, each ends as the unbroken run to the last bit"
    )


def signal_ranks(scratch: Path, tries: int) -> str:
    """Send each signal to the launcher and to one rank of two, and to torchrun's agent."""
    targets = ("the launcher", "rank 1", "rank 0", "torchrun")
    longest = 0.0
    for number in range(tries):
        target, sent = targets[number % len(targets)], SIGNALS[number % len(SIGNALS)]
        launcher = TORCHRUN if target == "torchrun" else ""
        command = Command(LONG, scratch / str(number), launcher=launcher)
        command.until_step(10)
        ranks = command.ranks()
        pid = ranks[int(target[-1])] if target[:4] == "rank" else command.process.pid
        began = time.monotonic()
        os.kill(pid, sent)
        code = command.process.wait(60)
        longest = max(longest, time.monotonic() - began)
        # torchrun has codes of its own; a rank alone that it restarts is not asked of it here.
        if not launcher:
            expect(code == 128 + sent, f"{sent.name} to {target}: exit code {code}")
        found = status(command.cwd / "run")
        expect(found["state"] == "interrupted", f"{sent.name} to {target}: {found}")
        newest = max(command.cwd.glob("run/checkpoints/step_*.pt")).stem
        expect(int(newest[5:]) == found["step"], f"{newest} is not step {found['step']}")
        expect(command.said.count("received SIG") == 1, f"not said once: {command.said[-300:]}")
        expect(not command.family(), "processes are left behind")
    check_time(longest)
    return f"to {', '.join(targets)}; at most {longest:.1f} s to the end, one step saved by all"


def check_time(longest: float) -> None:
    """The end came soon enough."""
    expect(longest < LONGEST_SECONDS, f"it took {longest:.1f} s to end")


def second_interrupt(scratch: Path, tries: int) -> str:
    """Press Ctrl-C twice."""
    longest = 0.0
    for number in range(tries):
        command = Command(LONG, scratch / str(number))
        command.until_step(5)
        began = time.monotonic()
        for _ in range(2):
            os.kill(command.process.pid, signal.SIGINT)
            time.sleep(0.1)
        code = command.wait()
        longest = max(longest, time.monotonic() - began)
        expect(code in (1, 130), f"exit code {code}")
    expect(longest < 2, f"it took {longest:.1f} s to end")
    return f"at most {longest:.1f} s to the end of two ranks"


def rank_killed(scratch: Path, tries: int, launcher: str = "") -> str:
    """Kill a rank again and again: the run starts itself anew, and ends as an unbroken one."""
    whole = Command(SHORT, scratch / "unbroken", launcher=launcher)
    expect(whole.wait() == 0, f"the unbroken run failed: {whole.said[-300:]}")
    for number in range(tries):
        command = Command(SHORT, scratch / str(number), launcher=launcher)
        for step in (12, 40)[: 1 + number % 2]:
            command.until_step(step)
            before = command.ranks()
            os.kill(before[number % 2], signal.SIGKILL)
            command.until_true(partial(is_replaced, command, before), "it was not started again")
        expect(command.wait() == 0, f"it failed: {command.said[-300:]}")
        same = losses(command.cwd / "run") == losses(whole.cwd / "run")
        expect(same, "its losses are not those of the unbroken run")
        named = "no answer from rank" in command.said or "was ended by SIGKILL" in command.said
        expect(named, f"the rank is not named: {command.said[-300:]}")
    return "started anew from the last save by itself; the same losses logged to the last bit"


def is_replaced(command: Command, before: list[int]) -> bool:
    """Whether every rank is another process than before."""
    ranks = command.ranks()
    return len(ranks) == len(before) and not set(ranks) & set(before)


def rank_killed_under_torchrun(scratch: Path, tries: int) -> str:
    """The same, where torchrun starts the ranks anew."""
    return rank_killed(scratch, tries, TORCHRUN)


def rank_hangs(scratch: Path, tries: int) -> str:
    """Stop a rank: the other says which one and where, and the run starts itself anew."""
    longest = 0.0
    for number in range(tries):
        words = f"{SHORT} --run.timeout-seconds {HUNG_SECONDS}"
        command = Command(words, scratch / str(number))
        command.until_step(12)
        began = time.monotonic()
        os.kill(command.ranks()[1], signal.SIGSTOP)
        command.until("no answer from rank 1 on ")
        command.until("restart 1 of 3", 60)
        longest = max(longest, time.monotonic() - began)
        expect("which is stopped" in command.said, "it is not said that it is stopped")
        expect(".py:" in command.said, "the line is not named")
        expect(command.wait() == 0, f"it failed: {command.said[-300:]}")
    expect(longest < HUNG_SECONDS + 45, f"it took {longest:.0f} s")
    return (
        f"named with its host and line; started anew {longest:.0f} s after it stopped, "
        f"--run.timeout-seconds {HUNG_SECONDS}"
    )


def launcher_killed(scratch: Path, tries: int) -> str:
    """Kill the launcher: its ranks save and leave, and nothing is left behind."""
    longest = 0.0
    for number in range(tries):
        command = Command(LONG, scratch / str(number))
        command.until_step(10)
        began = time.monotonic()
        command.process.kill()
        command.process.wait()
        while command.family():
            time.sleep(0.05)
            if time.monotonic() - began > LONGEST_SECONDS:
                command.close()
                raise LossError("ranks train on without it")
        longest = max(longest, time.monotonic() - began)
        expect(status(command.cwd / "run")["state"] == "interrupted", "they have not saved")
    return f"all ranks saved and gone after {longest:.1f} s"


def all_killed(scratch: Path, tries: int) -> str:
    """Kill the launcher and its ranks: what they met in is gone, and the run can go on."""
    for number in range(tries):
        command = Command(f"{SHORT} --epochs 2000", scratch / str(number))
        command.until_step(12)
        pid = command.process.pid
        for process in (pid, *command.ranks()):
            os.kill(process, signal.SIGKILL)
        command.process.wait()
        left = [path.name for path in Path(tempfile.gettempdir()).glob(f"store-*-{pid}-*")]
        expect(not left, f"{left} are left")
        again = Command(f"{SHORT} --epochs 2000", scratch / str(number))
        again.until("from step ")
        expect("from step 0 of" not in again.said, "it began anew")
        again.close()
    return "no file of theirs was left; continued from the last save"


def racing_starts(scratch: Path, tries: int) -> str:
    """Start eight runs in one folder at once: one trains, the others are refused."""
    for number in range(tries):
        config = small(scratch / str(number), epochs=20)
        pids = [fork(refused_or_train, config) for _ in range(8)]
        codes: dict[int, int] = {}
        end = time.monotonic() + 60
        while len(codes) < len(pids) - 1 and time.monotonic() < end:
            for pid in set(pids) - codes.keys():
                ended, state = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[pid] = os.waitstatus_to_exitcode(state)
            time.sleep(0.01)
        for pid in set(pids) - codes.keys():
            kill_group(pid)
            wait(pid)
        refused = list(codes.values())
        expect(refused == [0] * 7, f"{len(refused)} of 7 were refused: {refused}")
        train_whole(config)
    return "one winner each time, and after a `kill -9` no hindrance"


def refused_or_train(config: Config) -> None:
    """Train, or leave in peace if another run is there."""
    with contextlib.suppress(UserError):
        train(config)
        raise LossError("it came to its end")
