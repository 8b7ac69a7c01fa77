# ruff: noqa: PLC0415 - after --help, which needs no torch
"""What `predict` costs beside the loader: rows of CSV against the same images that nobody looks at.

    python benchmarks/predicting.py RUN PATH... [--rounds 5] [--workers 1]

In each round the bare loader decodes all images, and `predict` labels them, with as many workers,
in one process and in turns, which of the two first alternates. Both times begin before the workers
are forked. Prints each round, and the medians.
"""

import argparse
import contextlib
import io
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import rounds

sys.path.insert(0, str(rounds.PROJECT / "src"))


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("paths", nargs="+")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()

    from image_classifier import predict
    from image_classifier.config import ComputeConfig
    from image_classifier.distributed import join_world
    from image_classifier.journal import open_journal
    from image_classifier.listing import list_files
    from image_classifier.rows import Csv
    from image_classifier.trained import open_trained

    compute = ComputeConfig(device="cpu")
    files = list_files(options.paths, sys.stdin.buffer, b"\n")
    with join_world(compute) as world, tempfile.TemporaryDirectory() as folder:
        trained = open_trained(options.run, compute, world)

        def loader(data: predict.PredictData) -> None:
            for _ in data.batches(0):
                pass

        def whole(data: predict.PredictData) -> None:
            rows, identity = Csv(trained.classes, 5), {"--batch-size": 256}
            out = Path(folder, "labels.csv")
            with (
                open_journal(out, rows, files, identity, fresh=True) as journal,
                contextlib.redirect_stdout(io.StringIO()),
            ):
                predict.to_file(journal, trained, data, 5)

        def seconds(work) -> tuple[float, float]:  # noqa: ANN001
            data = predict.PredictData(files, trained, 256, options.workers, world)
            began, cpu = time.perf_counter(), time.process_time()
            work(data)
            took = time.perf_counter() - began, time.process_time() - cpu
            data.close()
            return took

        seconds(loader)  # what is imported, and the files in memory
        ratios, own = [], []
        for number in range(options.rounds):
            order = (loader, whole) if number % 2 else (whole, loader)
            took = {work.__name__: seconds(work) for work in order}
            ratios.append(took["loader"][0] / took["whole"][0])
            own.append(1e6 * (took["whole"][1] - took["loader"][1]) / len(files))
            speeds = {name: f"{len(files) / wall:,.0f}" for name, (wall, _) in took.items()}
            print(
                f"images/s {speeds}, ratio {ratios[-1]:.3f}, own CPU {own[-1]:.0f} us", flush=True
            )
        print(
            f"{len(files):,} images, {options.workers} workers, load {os.getloadavg()[0]:.1f}: "
            f"predict reaches {statistics.median(ratios):.3f} of the loader's images/s "
            f"({min(ratios):.3f} to {max(ratios):.3f}); the main process computes "
            f"{statistics.median(own):.0f} us per image more"
        )


if __name__ == "__main__":
    main()
