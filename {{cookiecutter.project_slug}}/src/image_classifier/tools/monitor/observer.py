"""What a run says of its speed and its set-up: warnings, lines at the start, metrics, verdicts."""

from ...tracking import Observer, Setup, Speed
from . import bottleneck, flops, gpu, sanity_checks


def open_observer(setup: Setup) -> Observer:
    """Look for mistakes, count FLOPs, and find the GPUs; then judge the speed of each epoch."""
    costs, mfu = flops.open_mfu(setup)
    gpus = gpu.Gpus(setup.world)
    judge = bottleneck.open_judge(setup.config, setup.train_data, gpus)

    def metrics(speed: Speed | None) -> dict[str, float]:
        return ({"train/mfu": round(mfu(speed), 4)} if mfu and speed else {}) | gpus.read()

    def verdict(speed: Speed) -> str:
        return f"{judge(speed)} MFU {mfu(speed):.0%}." if mfu else judge(speed)

    notes = tuple(filter(None, (costs, gpus.note)))
    return Observer(sanity_checks.find_mistakes(setup), notes, metrics, verdict)
