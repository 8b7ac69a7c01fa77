"""A long run: neither memory, nor open files, nor the time of a step may grow."""

import os
import statistics
import time
from pathlib import Path

from .children import expect, fork, read_rows, small, status, train

WARM = 0.1  # share of the run that does not count
MOST_GROWTH = 0.05


def twenty_thousand_steps(scratch: Path, tries: int) -> str:
    """Train so many tiny steps with two workers, and look at all processes all the while."""
    config = small(
        scratch / "run",
        epochs=tries / 40,
        data__limit=320,
        data__batch_size=8,
        data__image_size=16,
        data__where="stream",
        data__workers=2,
        run__evaluate_every_epochs=tries / 40 / 20,
        run__log_every_steps=40,
    )
    folder = Path(config.run.dir)
    pid = fork(train, config)
    samples: list[tuple[int, int, int]] = []  # memory of the main process, of workers, open files
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if (folder / "metrics.jsonl").exists():
            samples.append(look(pid))
        time.sleep(0.25)
    expect(status(folder)["state"] == "done", "it did not come to its end")
    warm = samples[int(len(samples) * WARM) : -2]
    fifth = max(1, len(warm) // 5)
    growth = []
    for column in range(3):
        values = [sample[column] for sample in warm]
        growth.append(statistics.median(values[-fifth:]) / statistics.median(values[:fifth]) - 1)
    rows = read_rows(folder / "metrics.jsonl")
    rates = [rate for row in rows if (rate := row.get("train/images_per_second"))]
    tenth = max(1, len(rates) // 10)
    slowdown = 1 - statistics.median(rates[-tenth:]) / statistics.median(rates[1 : tenth + 1])
    main, workers, files = growth
    seen = (
        f"memory {main:+.1%} (main), {workers:+.1%} (workers), open files {files:+.0%} "
        f"after the first tenth; last tenth of steps {-slowdown:+.0%} in speed"
    )
    expect(max(growth) < MOST_GROWTH, f"it grows: {seen}")
    expect(slowdown < 0.25, f"it slows down: {seen}")
    return seen


def look(pid: int) -> tuple[int, int, int]:
    """Memory of its own, that of its workers, and the files that a process has open."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return (
        resident(pid),
        sum(resident(int(c)) for c in children),
        len(os.listdir(f"/proc/{pid}/fd")),
    )


def resident(pid: int) -> int:
    """Pages in memory."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
