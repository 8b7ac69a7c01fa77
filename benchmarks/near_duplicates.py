# ruff: noqa: PLC0415 - the process that measures imports torch, the one that starts it does not
"""How many changed copies of images `check` finds, and how many pairs that it finds are none.

    python benchmarks/near_duplicates.py
    python benchmarks/near_duplicates.py --files flowers brain

On generated photographs and generated scans (gray, dark, centered, with one outline), and on your
folders. Every image is copied with one change, and copies and originals are searched together. A
copy counts as found if it is a near-duplicate of its original. A pair of others is false; of your
own images it may be right, so their originals' pairs are counted apart and are not false. `told`
is the share of originals that `check` would call too alike to judge.

Prints and writes `results/near_duplicates.json`. `--json FILE` lists the pairs of originals.
"""

import argparse
import io
import json
import random
from collections.abc import Callable
from pathlib import Path

import measurements
import numpy as np
import pictures
import rounds
from PIL import Image

ABOUT = "tools/near_duplicates"


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
    "gray": lambda image, _: jpeg(image.convert("L")),
}

GENERATED: dict[str, Callable[[int], Image.Image]] = {
    "photographs": pictures.photograph,
    "scans": pictures.scan,
    "scans of one outline": lambda number: pictures.scan(number, jitter=0),
}


def small(content: bytes) -> np.ndarray:
    """A gray image as `check` makes it."""
    from image_classifier.data.crops import resize
    from image_classifier.data.decode import decode_image
    from image_classifier.tools.check.survey import SIDE, gray

    return gray(resize(decode_image(content), SIDE, SIDE).numpy())


def originals(options: argparse.Namespace) -> tuple[list[str], list[bytes]]:
    """Names and contents of the images of a contender."""
    if options.contender in GENERATED:
        draw = GENERATED[options.contender]
        return [], [jpeg(draw(number), 90) for number in range(options.images)]
    (folder,) = (path for path in options.files if path.name == options.contender)
    suffixes = (".jpg", ".jpeg", ".png")
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in suffixes)
    count = min(options.images, len(files))
    files = [files[n * len(files) // count] for n in range(count)]
    return list(map(str, files)), [path.read_bytes() for path in files]


def search(contents: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of near-duplicates, and pairs that look alike: (pairs, 2)."""
    import torch
    from image_classifier.tools.near_duplicates import copies as tool

    images = torch.from_numpy(np.stack([small(content) for content in contents]))
    sides = torch.tensor([min(Image.open(io.BytesIO(content)).size) for content in contents])
    pairs, scores = tool.find_candidates(images, torch.arange(len(images)))
    are_same = tool.are_copies(images, sides, pairs)
    return pairs[are_same].numpy(), pairs[~are_same & (scores > tool.LOOK_ALIKE)].numpy()


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Of each change, the percentage of the copies that are found; and of all pairs, the right."""
    names, contents = originals(options)
    count = len(contents)
    alone, alike = search(contents)
    if options.json and names:
        found = [[names[first], names[second]] for first, second in alone.tolist()]
        options.json.write_text(json.dumps(found, indent=1))
    known = set() if options.contender in GENERATED else set(map(tuple, alone.tolist()))
    result, right, false = {}, 0, 0
    for title, change in CHANGES.items():
        chance = random.Random(options.round)
        images = [Image.open(io.BytesIO(content)).convert("RGB") for content in contents]
        pairs, _ = search([*contents, *(change(image, chance) for image in images)])
        first, second = np.sort(pairs % count, axis=1).T
        is_right = first == second
        right += int(is_right.sum())
        false += sum(
            pair not in known for pair in zip(first[~is_right], second[~is_right], strict=True)
        )
        result[f"{title}, found %"] = 100 * int(is_right.sum()) / count
    result["right, % of the pairs"] = 100 * right / max(1, right + false)
    result["false pairs"] = false
    result["pairs of originals"] = len(alone)
    result["told, % of originals"] = 100 * len(np.unique(alike)) / count
    return result


def main() -> None:
    """Make the copies, search, count."""
    parser = rounds.parser(__doc__, rounds=1)
    parser.add_argument("--files", type=Path, nargs="*", default=[], help="folders of images")
    parser.add_argument("--images", type=int, default=400, help="how many of each are copied")
    parser.add_argument("--json", type=Path, help="file for the pairs of originals that are found")
    options = parser.parse_args()
    if options.contender:
        rounds.give(measure, options)
        return
    names = [*GENERATED, *(path.name for path in options.files)]
    results, failures = rounds.compare(__file__, names, options)
    generated = [
        found[0]["right, % of the pairs"] for name, found in results.items() if name in GENERATED
    ]
    goals = [
        measurements.goal(
            "right pairs of generated images, %, the worse", ">= 99.9", [min(generated)]
        )
    ]
    measurements.write(
        options.results / "near_duplicates.json",
        "Changed copies that `check` finds",
        f"Up to {options.images} images of each kind, each copied with one change at a time.",
        measurements.measured(results, failures, goals),
    )


if __name__ == "__main__":
    main()
