# ruff: noqa: PLC0415 - a contender's process imports what that contender needs, and nothing else
"""Augmentation by tools, `policies` and `transforms`: CPU time per image of 224 x 224 pixels.

    python benchmarks/policies.py
    python benchmarks/policies.py --rounds 1 --seconds 1      # a quick look

- `torchvision-v1`: transforms of PIL images, one at a time
- `torchvision-v2`: transforms of uint8 tensors, one at a time
- `ours`: batches of 64, as `train` has them

Each on one thread, with the same photographs; decoding and cropping are not in it. `turns` are
flips upside down and quarter turns, `jitter` is of 0.4, `blur` of a fifth of the images.

Prints and writes `results/policies.json`.
"""

import random
import time
import warnings
from collections.abc import Callable
from typing import Any

import measurements
import pictures
import rounds

ABOUT = "tools/policies/policy tools/transforms/policy"
SIDE, BATCH = 224, 64
POLICIES = ("trivialaugment", "randaugment")
TRANSFORMS: dict[str, dict[str, Any]] = {
    "turns": {"vertical_flip": True, "turns": True},
    "jitter": {"jitter": 0.4},
    "grayscale": {"grayscale": 0.1},
    "blur": {"blur": 0.2},
}
KINDS = (*POLICIES, *TRANSFORMS)
CONTENDERS = ("torchvision-v1", "torchvision-v2", "ours")


def build(kind: str, contender: str, photographs: list[Any]) -> Callable[[], object]:
    """What augments a batch once."""
    import numpy as np
    import torch
    from torchvision import transforms
    from torchvision.transforms import v2

    if contender == "torchvision-v1":
        transform = theirs(transforms, kind)
        return lambda: [transform(image) for image in photographs]
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in photographs]))
    if contender == "torchvision-v2":
        transform = theirs(v2, kind)
        tensors = pixels.permute(0, 3, 1, 2).contiguous()
        return lambda: [transform(image) for image in tensors]
    from image_classifier.config import AugmentConfig
    from image_classifier.runtime.platform import keep_freed_memory
    from image_classifier.tools.policies.policy import Policy
    from image_classifier.tools.transforms.policy import Transforms

    keep_freed_memory()  # as in a run
    ours = Policy(kind) if kind in POLICIES else Transforms(AugmentConfig(**TRANSFORMS[kind]))
    return lambda: ours(pixels, torch.rand(BATCH, ours.num_draws))


def theirs(library: Any, kind: str) -> Callable[[Any], object]:  # noqa: ANN401 - transforms or v2
    """The same of torchvision."""
    turn = library.functional.rotate
    known = {
        "trivialaugment": library.TrivialAugmentWide,
        "randaugment": library.RandAugment,
        "turns": lambda: library.Compose(
            [
                library.RandomVerticalFlip(),
                library.Lambda(lambda image: turn(image, random.choice((0, 90, 180, 270)))),
            ]
        ),
        "jitter": lambda: library.ColorJitter(0.4, 0.4, 0.4),
        "grayscale": lambda: library.RandomGrayscale(0.1),
        "blur": lambda: library.RandomApply([library.GaussianBlur(SIDE // 10 | 1)], 0.2),
    }
    return known[kind]()


def measure(options: Any) -> dict[str, float]:  # noqa: ANN401 - of argparse
    """CPU time per image."""
    import torch

    torch.set_num_threads(1)
    photographs = [pictures.photograph(number, (SIDE, SIDE)) for number in range(BATCH)]
    kind, _, contender = options.contender.partition(":")
    augment = build(kind, contender, photographs)
    batches = 0
    for _ in range(3):
        augment()
    began, end = rounds.Reading.now(), time.perf_counter() + options.seconds
    while time.perf_counter() < end:
        augment()
        batches += 1
    took = rounds.Reading.now().since(began)
    return {"cpu_ms": 1e3 * took.cpu_seconds / (batches * BATCH)}


def main() -> None:
    """Compare."""
    parser = rounds.parser(__doc__, rounds=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="timed per round (3)")
    options = parser.parse_args()
    if options.contender:
        warnings.simplefilter("ignore")
        rounds.give(measure, options)
        return
    names = [f"{kind}:{contender}" for kind in KINDS for contender in CONTENDERS]
    results, failures = rounds.compare(__file__, names, options)
    for kind in KINDS:
        for peer in CONTENDERS[:2]:
            measurements.relate(results, "cpu_ms", [f"{kind}:ours"], f"{kind}:{peer}")
    measurements.write(
        options.results / "policies.json",
        "Augmentation of photographs of 224 x 224 pixels; RandAugment does two operations",
        f"{options.seconds:g} s per round, one thread. Medians (lowest to highest); ratios are "
        "taken within a round.",
        measurements.measured(results, failures, goals(results)),
    )


def goals(results: measurements.Results) -> list[dict[str, Any]]:
    """What was asked for, and what came out."""
    return [
        measurements.goal(
            f"{policy}: CPU ms per image",
            "<= 0.15",
            measurements.numbers(results, f"{policy}:ours", "cpu_ms"),
        )
        for policy in POLICIES
    ]


if __name__ == "__main__":
    main()
