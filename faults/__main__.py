"""Inject every fault, and write the table of tries and losses.

python -m faults                      # all into benchmarks/results/faults.json; or what is left
python -m faults --short              # a few tries of each, printed
python -m faults --only kill          # rows whose names hold a word, printed
python -m faults --again worker       # rows whose names hold a word, in place of those in that file
python -m faults --gpu --tries 20     # the rows that say most on a GPU, printed
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import measurements

from . import PROJECT, ROOT, disks, kills, long, many, random_runs, ranks, steps
from .children import small, train_whole
from .suites import tests_of
from .table import Facts, Row, run_row

KEPT = ROOT / "build" / "faults.json"  # rows of a call that was interrupted
# What keeps the promises.
ABOUT = "augment checkpoints data evaluate models optim pace parallel precision runtime settle"
ABOUT += " tracking train"
ABOUT += " tools/diagnose tools/holdout tools/transforms"

ROWS = [
    Row(
        "`kill -9` of the whole run at random moments, with 0, 1 or 2 workers at each start",
        "0 unreadable, 0 saved steps lost, weights and log as of an unbroken run",
        kills.in_training,
        200,
        3,
    ),
    Row(
        "the same with flips, turns, color jitter and blur, of groups, some of them for a test",
        "weights, log and test score as of an unbroken run",
        kills.with_tools,
        30,
        0,
    ),
    Row(
        "runs with random options, networks and data, killed at a random step",
        "refused in a line, or as an unbroken run once begun again",
        random_runs.resumed,
        100,
        3,
    ),
    Row(
        "`kill -9` of a process that does nothing but save",
        "0 unreadable, 0 acknowledged saves lost, one temporary file at most",
        kills.in_saves,
        200,
        5,
    ),
    Row("power cut", "0 unreadable, 0 acknowledged saves lost", kills.power_cut, 40, 0),
    Row(
        "damaged checkpoint: cut short, overwritten, bits turned",
        "never read as if it were sound",
        kills.damage,
        300,
        20,
    ),
    Row(
        "SIGTERM, SIGINT, SIGUSR1 to a run of one process",
        "saved and ended within 10 s; goes on exactly",
        ranks.signal_alone,
        15,
        0,
    ),
    Row(
        "the same to one of two ranks or to what launched them",
        "all ranks save the same step once and end within 10 s",
        ranks.signal_ranks,
        12,
        0,
    ),
    Row(
        "`kill -9` of all processes of a run of 1, 2 or 3 ranks at random moments",
        "0 unreadable, weights and log as of an unbroken run",
        kills.all_ranks,
        30,
        0,
    ),
    Row("Ctrl-C twice", "the end at once", ranks.second_interrupt, 3, 0),
    Row(
        "`kill -9` of a rank",
        "named; all start anew from the last save; same losses",
        ranks.rank_killed,
        4,
        0,
    ),
    Row(
        "the same under `torchrun --max-restarts`",
        "the same",
        ranks.rank_killed_under_torchrun,
        2,
        0,
    ),
    Row(
        "a rank hangs (SIGSTOP)",
        "named with host and line within the timeout; ended or started anew 45 s later",
        ranks.rank_hangs,
        2,
        0,
    ),
    Row("`kill -9` of the launcher", "ranks save and leave", ranks.launcher_killed, 3, 0),
    Row(
        "`kill -9` of the launcher and all ranks at once",
        "nothing is left in the temporary folder; the same command goes on",
        ranks.all_killed,
        3,
        0,
    ),
    Row(
        "eight runs started at once in one folder", "one of them trains", ranks.racing_starts, 5, 0
    ),
    Row(
        "`kill -9` of `repeat` and `cross-validate`, of the run that they train, or of both",
        "the same command, begun anew at once, ends as an unbroken one",
        many.several,
        6,
        0,
    ),
    Row(
        "`kill -9` of `search`",
        "the same command goes on; nothing is trained twice",
        tests_of(
            PROJECT, "src/image_classifier/tools/search/tests/test_search.py", "-k", "killed_search"
        ),
        1,
        0,
    ),
    Row(
        "`kill -9` of a worker of Ray",
        "all workers start anew from the last save, and learn as one process",
        tests_of(
            PROJECT, "src/image_classifier/tools/ray_train/tests/test_ray_train.py", "-k", "kill"
        ),
        1,
        0,
    ),
    Row(
        "the clock jumps by a year, back or ahead, at each look; files of the run too",
        "a run ends as an unbroken one",
        many.clocks,
        12,
        1,
    ),
    Row(
        "out of memory on one of two ranks",
        "half the micro-batch, agreed on; same batches and learning rates",
        steps.out_of_memory,
        2,
        0,
    ),
    Row(
        "disk full while saving (a small tmpfs)",
        "what was saved is whole; the run ends, and the same command resumes it",
        disks.full,
        3,
        1,
    ),
    Row(
        "disk full while the ranks of an FSDP run save their parts",
        "both name the step that is kept; with space, the same command ends as an unbroken run",
        disks.sharded,
        3,
        0,
    ),
    Row(
        "standard output on a full disk, closed, or with nobody who reads it",
        "a run comes to its end; other commands do their work and end with 1",
        tests_of(PROJECT, "tests/test_console.py"),
        1,
        0,
    ),
    Row(
        "a loss that is inf or nan; fp16's scaler overflows",
        "no weight moves; the run ends at the next log line with the steps; fp16 skips the step",
        tests_of(PROJECT, "tests/test_faults.py", "-k", "finite"),
        1,
        0,
    ),
    Row(
        "ranks come and go within an epoch: 2, 1, 2",
        "no image missed or seen twice",
        tests_of(PROJECT, "tests/test_resume.py", "-k", "come_and_go"),
        1,
        0,
    ),
    Row(
        "odd files (CMYK, 16 bits, EXIF, bombs, ...) and 2,000 damaged ones",
        "the right pixels, or refused by name with the reason",
        tests_of(PROJECT, "tests/test_images.py", FUZZED_IMAGES="2000"),
        1,
        0,
    ),
    Row(
        "files that vanish or can't be read while training",
        "named; or masked in their places, counted and listed",
        tests_of(PROJECT, "tests/test_bad_images.py", "src/image_classifier/tools/skip_bad_images"),
        1,
        0,
    ),
    Row(
        "`kill -9` of a data worker at random moments",
        "named within seconds; continued, the run ends as an unbroken one",
        kills.data_workers,
        24,
        0,
    ),
    Row(
        "all data workers killed, one by SIGBUS; one that hangs",
        "one line that says how and what to do, within seconds or the timeout",
        tests_of(PROJECT, "tests/test_stream.py", "-k", "worker"),
        1,
        0,
    ),
    Row(
        "images on a disk that can't be written; 4 MB of /dev/shm",
        "trains all the same",
        tests_of(ROOT, "tests/test_faults_data.py"),
        1,
        0,
    ),
    Row(
        "hostile checkpoints and names of classes, files and folders",
        "no code runs; refused in a line, or shown escaped",
        tests_of(PROJECT, "tests/test_security.py"),
        1,
        0,
    ),
    Row(
        "a checkpoint with wrong values, or nothing, in its places",
        "refused in a line that names the place, or used without harm",
        tests_of(PROJECT, "tests/test_weights.py"),
        1,
        0,
    ),
    Row(
        "damaged JSON beside a run: of metrics, config, status, measurements",
        "the run goes on without it, or it is refused in a line",
        tests_of(PROJECT, "tests/test_files.py"),
        1,
        0,
    ),
    Row(
        "hostile answers to the template",
        "refused in a line, nothing written; or kept as they are",
        tests_of(ROOT, "tests/test_refusal.py"),
        1,
        0,
    ),
    Row(
        "ports looked at during training; secrets planted",
        "none beyond loopback; none in any file",
        tests_of(ROOT, "tests/test_sockets.py"),
        1,
        0,
    ),
    Row(
        "a job on a cluster of stand-ins is preempted",
        "saved, and back in the queue once",
        tests_of(ROOT, "tests/test_cluster.py"),
        1,
        0,
    ),
    Row(
        "mistakes in config, data and code that a run cannot survive",
        "refused before the first step",
        tests_of(PROJECT, "tests/test_checks.py"),
        1,
        0,
    ),
    Row(
        "mistakes that it can survive",
        "warned of before the first step",
        tests_of(PROJECT, "src/image_classifier/tools/monitor/tests/test_warnings.py"),
        1,
        0,
    ),
    Row(
        "20,000 steps",
        "memory and open files grow by less than 5 % after the first tenth; no slow-down",
        long.twenty_thousand_steps,
        20_000,
        0,
    ),
]

ON_GPU = [
    Row(
        "`kill -9` at random moments of a run with `--deterministic`",
        "weights and log as of an unbroken run, to the last bit",
        kills.with_deterministic,
        20,
        1,
    ),
    Row(
        "the same without it",
        "each step has the same images, labels and pixels",
        kills.without_deterministic,
        20,
        1,
    ),
    Row(
        "`kill -9` of a transformer with `--deterministic`, whose page has maps",
        "weights and log as of an unbroken run, to the last bit",
        kills.of_transformers,
        20,
        1,
    ),
]


def main() -> int:
    """Inject the faults that are asked for; the exit code is 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="a few tries of each; writes nothing")
    parser.add_argument("--only", default="", help="rows whose names hold this; writes nothing")
    parser.add_argument("--again", default="", help="rows whose names hold this, measured anew")
    parser.add_argument("--tries", type=int, default=0, help="of each row, in place of its own")
    parser.add_argument("--gpu", action="store_true", help="the rows for a GPU; writes nothing")
    options = parser.parse_args()
    digest = measurements.digest(Path(__file__))  # of the code that runs, though it may change
    with tempfile.TemporaryDirectory() as scratch:
        train_whole(small(Path(scratch)))  # the first run has modules to compile: it tells no time
    is_whole = not (options.short or options.only or options.again or options.tries or options.gpu)
    before, results = kept(digest) if is_whole else (0, {})
    seconds = before
    rows = ON_GPU if options.gpu else ROWS
    for row in rows:
        tries = options.tries or (row.short_tries if options.short else row.tries)
        if not tries or (options.only or options.again) not in row.fault or row.fault in results:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            facts = run_row(row, Path(scratch), tries)
        results[row.fault] = facts
        seconds = before + round(time.monotonic() - measurements.STARTED)
        print("{verdict:>12}  {seconds:4} s  {fault}: {seen}".format_map(facts), flush=True)
        if is_whole:
            keep(digest, seconds, results)
    path = measurements.RESULTS / "faults.json"
    if options.again:
        replace_rows(path, [*results.values()])
    elif is_whole:
        about = "Faults that were injected into the generated project."
        found = {"seconds": seconds, "faults": [results[row.fault] for row in rows]}
        measurements.write(path, "Faults", about, measurements.measured({}, {}) | found)
        KEPT.unlink()
    return int(any(facts["verdict"] == "BROKEN" for facts in results.values()))


def kept(digest: str) -> tuple[int, dict[str, Facts]]:
    """How long a call that was interrupted took, and its rows by their faults, if of this code."""
    if not KEPT.exists():
        return 0, {}
    found = json.loads(KEPT.read_text(encoding="utf-8"))
    return (found["seconds"], found["rows"]) if found["digest"] == digest else (0, {})


def keep(digest: str, seconds: int, rows: dict[str, Facts]) -> None:
    """Keep the rows that are through for a call that goes on with the others."""
    known = {"digest": digest, "seconds": seconds, "rows": rows}
    KEPT.parent.mkdir(exist_ok=True)
    KEPT.write_text(measurements.as_text(known), encoding="utf-8")


def replace_rows(path: Path, results: list[Facts]) -> None:
    """Put results of rows that were measured again in place of those in a file, and say so."""
    found = json.loads(path.read_text(encoding="utf-8"))
    known = {facts["fault"]: facts for facts in found["faults"]}
    for new in results:
        new["seen"] += f" (measured again, commit {measurements.commit()})"
        known[new["fault"]] = new
    found["faults"] = [known[row.fault] for row in ROWS if row.fault in known]
    path.write_text(measurements.as_text(found), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
