# ruff: noqa: PLC0415 - the process that measures imports torch, the one that starts it does not
"""How many changed copies of images `check` finds, and how many false pairs.

    python benchmarks/near_duplicates.py --files photos
    python benchmarks/near_duplicates.py --files cifar/train --images 2000

Every image is copied with one change, and copies and originals are searched together. A copy counts
as found if it is in one group with its original. Other pairs, of images whose originals are not in
one group, are false alarms. `--json FILE` lists the pairs of originals, for a person to judge.

Prints and writes `results/near_duplicates-<folder>.json`.
"""

import argparse
import io
import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import record
import rounds
from PIL import Image

ABOUT = "tools/check"


def jpeg(image: Image.Image, quality: int = 85) -> bytes:
    """An image as a file has it."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return file.getvalue()


def scaled(image: Image.Image, scale: float) -> Image.Image:
    """An image of another size."""
    size = [max(8, round(side * scale)) for side in image.size]
    return image.resize(size, Image.Resampling.BICUBIC)


def cropped(image: Image.Image, share: float, chance: random.Random) -> Image.Image:
    """An image less a share of its rows and of its columns, at a random place."""
    width, height = (round(side * (1 - share)) for side in image.size)
    left = chance.randint(0, image.width - width)
    top = chance.randint(0, image.height - height)
    return image.crop((left, top, left + width, top + height))


CHANGES: dict[str, Callable[[Image.Image, random.Random], bytes]] = {
    "JPEG of quality 60": lambda image, _: jpeg(image, 60),
    "JPEG of quality 30": lambda image, _: jpeg(image, 30),
    "half the size": lambda image, _: jpeg(scaled(image, 0.5)),
    "a quarter of the size": lambda image, _: jpeg(scaled(image, 0.25)),
    "twice the size": lambda image, _: jpeg(scaled(image, 2)),
    "2 % cut off": lambda image, chance: jpeg(cropped(image, 0.02, chance)),
    "5 % cut off": lambda image, chance: jpeg(cropped(image, 0.05, chance)),
    "10 % cut off": lambda image, chance: jpeg(cropped(image, 0.10, chance)),
    "15 % cut off": lambda image, chance: jpeg(cropped(image, 0.15, chance)),
    "a quarter brighter": lambda image, _: jpeg(image.point(lambda value: min(255, value * 1.25))),
    "grey": lambda image, _: jpeg(image.convert("L")),
}


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Of one change, the percentage of the copies that are found, and the other pairs."""
    from image_classifier.data.crops import resize
    from image_classifier.data.decode import decode
    from image_classifier.tools.check.near_duplicates import (
        SIDE,
        connected_components,
        find_near_duplicates,
    )
    from image_classifier.tools.check.survey import gray

    suffixes = (".jpg", ".jpeg", ".png")
    files = sorted(path for path in options.files.rglob("*") if path.suffix in suffixes)
    count = min(options.images, len(files))
    files = [files[n * len(files) // count] for n in range(count)]

    def small(content: bytes) -> np.ndarray:
        return gray(resize(decode(content), SIDE, SIDE).numpy())

    originals = np.stack([small(path.read_bytes()) for path in files])
    alone = find_near_duplicates(originals, np.arange(count))
    if options.json:
        names = [[str(files[first]), str(files[second])] for first, second in alone.tolist()]
        options.json.write_text(json.dumps(names, indent=1))
    known = connected_components(alone, count)
    chance = random.Random(options.round)
    change = CHANGES[options.contender]
    images = [Image.open(path).convert("RGB") for path in files]
    copies = np.stack([small(change(image, chance)) for image in images])
    both = np.concatenate((originals, copies))
    pairs = find_near_duplicates(both, np.arange(len(both)))
    first, second = (side % count for side in pairs.T)
    groups = connected_components(pairs, 2 * count)
    return {
        "found_percent": 100 * float((groups[:count] == groups[count:]).float().mean()),
        "other_pairs": int((known[first] != known[second]).sum()),
        "pairs_of_originals": len(alone),
    }


def main() -> None:
    """Make the copies, search, count."""
    parser = rounds.parser(__doc__, rounds=1)
    parser.add_argument("--files", type=Path, required=True, help="folder of photographs")
    parser.add_argument("--images", type=int, default=400, help="how many of them are copied")
    parser.add_argument("--json", type=Path, help="file for the pairs of originals that are found")
    options = parser.parse_args()
    if options.contender:
        rounds.give(measure, options)
        return
    record.write(
        options.results / f"near_duplicates-{options.files.resolve().name}.json",
        f"Changed copies that `check` finds: {options.files.resolve().name}",
        f"{options.images} images.",
        record.measured(*rounds.compare(__file__, CHANGES, options)),
    )


if __name__ == "__main__":
    main()
