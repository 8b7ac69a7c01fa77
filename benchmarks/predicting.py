# ruff: noqa: PLC0415 - the process that measures imports torch, the one that starts it does not
"""What `predict` costs beside the loader: rows of CSV against the same images that nobody looks at.

    python benchmarks/predicting.py RUN PATH... [--rounds 5] [--workers 1]

In each round the bare loader decodes all images, and `predict` labels them, with as many workers,
in one process and in turns. Both times begin before the workers are forked.

Prints and writes `results/predicting.json`.
"""

import argparse
import contextlib
import io
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measurements
import project
import rounds

ABOUT = "data evaluate checkpoints/loaded metrics tools/predict"
CHUNK = 256  # images of a batch


def measure(options: argparse.Namespace) -> dict[str, float]:
    """What one round of `predict` and of the loader alone takes."""
    from image_classifier.checkpoints import load_model
    from image_classifier.runtime.distributed import join_world
    from image_classifier.tools.predict.command import PredictOptions
    from image_classifier.tools.predict.images import Images, list_files
    from image_classifier.tools.predict.output import Output
    from image_classifier.tools.predict.predict import predictions, write_rows

    compute = project.build_config().compute
    wanted = PredictOptions(options.run, tuple(options.paths))
    files = list_files(options.paths, sys.stdin.buffer, b"\n")
    with join_world(compute) as world, tempfile.TemporaryDirectory() as folder:
        trained = load_model(options.run, compute, world)

        def loader(images: Any) -> None:  # noqa: ANN401
            for _ in images.batches(0):
                pass

        def whole(images: Any) -> None:  # noqa: ANN401
            output = Output(Path(folder, "labels.csv"), {}, CHUNK, fresh=True)
            with contextlib.redirect_stdout(io.StringIO()):
                batches = predictions(trained, images, wanted, None, 0)
                write_rows(batches, trained, output, len(files), wanted.top_k)

        def seconds(work: Callable[[Any], None]) -> tuple[float, float]:
            images = Images(files, trained, CHUNK, options.workers, world)
            began, cpu = time.perf_counter(), time.process_time()
            work(images)
            took = time.perf_counter() - began, time.process_time() - cpu
            images.close()
            return took

        seconds(loader)  # what is imported, and the files in memory
        order = (loader, whole) if options.round % 2 else (whole, loader)
        took = {work: seconds(work) for work in order}
    return {
        "loader_images_per_second": len(files) / took[loader][0],
        "predict_images_per_second": len(files) / took[whole][0],
        "predict_x_loader": took[loader][0] / took[whole][0],
        "own_cpu_us_per_image": 1e6 * (took[whole][1] - took[loader][1]) / len(files),
    }


def main() -> None:
    """Compare."""
    parser = rounds.parser(__doc__, rounds=5)
    parser.add_argument("run", help="run folder of a trained model")
    parser.add_argument("paths", nargs="+", help="images, or folders of them")
    parser.add_argument("--workers", type=int, default=1, help="that decode (1)")
    options = parser.parse_args()
    if options.contender:
        rounds.give(measure, options)
        return
    measurements.write(
        options.results / "predicting.json",
        "`predict` beside the loader alone",
        f"{options.workers} workers, batches of {CHUNK}; what the main process computes beside "
        "what the loader does is its own CPU time. Medians (lowest to highest).",
        measurements.measured(*rounds.compare(__file__, ["in turns"], options)),
    )


if __name__ == "__main__":
    main()
