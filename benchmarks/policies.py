# ruff: noqa: PLC0415 - a contender's process imports what that contender needs, and nothing else
"""TrivialAugment and RandAugment: CPU time per image of 224 x 224 pixels.

    python benchmarks/policies.py
    python benchmarks/policies.py --rounds 1 --seconds 1      # a quick look

- `torchvision-v1`: transforms of PIL images, one at a time
- `torchvision-v2`: transforms of uint8 tensors, one at a time
- `ours`: batches of 64, as `train` has them

Each on one thread, with the same photographs; decoding and cropping are not in it.

Prints and writes `results/policies.json`.
"""

import time
import warnings
from collections.abc import Callable
from typing import Any

import pictures
import record
import rounds

ABOUT = "tools/policies/policy"
SIDE, BATCH = 224, 64
POLICIES = ("trivialaugment", "randaugment")
CONTENDERS = ("torchvision-v1", "torchvision-v2", "ours")


def build(policy: str, contender: str, photographs: list[Any]) -> Callable[[], object]:
    """What augments a batch once."""
    import numpy as np
    import torch
    from torchvision import transforms
    from torchvision.transforms import v2

    names = {"trivialaugment": "TrivialAugmentWide", "randaugment": "RandAugment"}
    if contender == "torchvision-v1":
        transform = getattr(transforms, names[policy])()
        return lambda: [transform(image) for image in photographs]
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in photographs]))
    if contender == "torchvision-v2":
        transform, tensors = getattr(v2, names[policy])(), pixels.permute(0, 3, 1, 2).contiguous()
        return lambda: [transform(image) for image in tensors]
    from image_classifier.runtime.platform import keep_freed_memory
    from image_classifier.tools.policies.policy import Policy

    keep_freed_memory()  # as in a run
    ours = Policy(policy)
    return lambda: ours(pixels, torch.rand(BATCH, ours.num_draws))


def measure(options: Any) -> dict[str, float]:  # noqa: ANN401 - of argparse
    """CPU time per image."""
    import torch

    torch.set_num_threads(1)
    photographs = [pictures.photograph(number, (SIDE, SIDE)) for number in range(BATCH)]
    policy, _, contender = options.contender.partition(":")
    augment, batches = build(policy, contender, photographs), 0
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
    names = [f"{policy}:{contender}" for policy in POLICIES for contender in CONTENDERS]
    results, failures = rounds.compare(__file__, names, options)
    for policy in POLICIES:
        ours = [f"{policy}:{contender}" for contender in CONTENDERS]
        for peer in CONTENDERS[:2]:
            record.relate(results, "cpu_ms", ours[-1:], f"{policy}:{peer}")
    record.write(
        options.results / "policies.json",
        "TrivialAugment and RandAugment (two operations), photographs of 224 x 224 pixels",
        f"{options.seconds:g} s per round, one thread. Medians (lowest to highest); ratios are "
        "taken within a round.",
        record.measured(results, failures, goals(results)),
    )


def goals(results: record.Results) -> list[dict[str, Any]]:
    """What was asked for, and what came out."""
    return [
        record.goal(
            f"{policy}: CPU ms per image",
            "<= 0.15",
            record.numbers(results, f"{policy}:ours", "cpu_ms"),
        )
        for policy in POLICIES
    ]


if __name__ == "__main__":
    main()
