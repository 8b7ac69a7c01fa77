"""What a run says of its speed and its set-up, each part as an observer of its own."""

from ...tracking import Observer, Setup, Speed
from . import bottleneck, flops, gpu, sanity_checks

PARTS = (bottleneck, flops, gpu, sanity_checks)  # in the order of their sentences and metrics


def open_observer(setup: Setup) -> Observer:
    """All parts as one observer."""
    parts = [part.observe(setup) for part in PARTS]

    def metrics(speed: Speed | None) -> dict[str, float]:
        return {name: value for part in parts for name, value in part.metrics(speed).items()}

    def verdict(speed: Speed) -> str:
        return " ".join(filter(None, (part.verdict(speed) for part in parts)))

    return Observer(
        warnings=tuple(line for part in parts for line in part.warnings),
        notes=tuple(line for part in parts for line in part.notes),
        metrics=metrics,
        verdict=verdict,
    )
