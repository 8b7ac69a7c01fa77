"""What goes wrong within a step: memory, numbers."""

from pathlib import Path

from . import PROJECT
from .children import FAST, Command, expect, read_rows

STARVED = """
import os, sys
from dataclasses import replace
sys.path.insert(0, {source!r})
import torch
from image_classifier.cli import main
from image_classifier.tasks import build_loss
import image_classifier.train as train

def build(*words):
    loss = build_loss(*words)
    def starved(logits, batch):
        if os.environ["RANK"] == "1" and len(logits) > 12:
            raise torch.OutOfMemoryError("planted")
        return loss.of(logits, batch)
    return replace(loss, of=starved)

train.build_loss = build
sys.exit(main(["train", *sys.argv[1:]]))
"""
WORDS = f"{FAST} --run.dir run --run.log-every-steps 1 --epochs 2 --precision fp32"


def out_of_memory(scratch: Path, tries: int) -> str:
    """Let one of two ranks have no memory for more than 12 of its 48 images."""
    script = scratch / "starved.py"
    script.write_text(STARVED.format(source=str(PROJECT / "src")))
    whole = Command(WORDS, scratch / "unbroken")
    expect(whole.wait() == 0, "the unbroken run failed")
    furthest = 0.0
    for number in range(tries):
        command = Command(WORDS, scratch / str(number), script=script)
        expect(command.wait() == 0, f"it failed: {command.said[-300:]}")
        for said in (
            "rank 1: out of memory at step 1 with micro-batch 48: started again",
            "rank 1: out of memory at step 1 with micro-batch 24: started again",
            "with 12 (the batch stays 96)",
        ):
            expect(said in command.said, f"not said: {said}")
        pairs = zip(
            read_rows(whole.cwd / "run" / "metrics.jsonl"),
            read_rows(command.cwd / "run" / "metrics.jsonl"),
            strict=True,
        )
        for one, other in pairs:
            for name in one.keys() & {"train/loss", "val/loss", "train/lr"}:
                furthest = max(furthest, abs(one[name] - other[name]) / one[name])
    expect(furthest < 1e-3, f"its losses are {furthest:.1%} away")
    return (
        "48 -> 24 -> 12 images at once, agreed by both ranks; the same batches and learning rates, "
        f"losses within {furthest:.0e}"
    )
