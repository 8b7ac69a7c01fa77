"""Files beside a run that are damaged, or no files at all: it goes on without, or says so."""

import json
from pathlib import Path

from image_classifier.train import train


def test_a_run_goes_on_beside_what_is_damaged(finished, damaged):
    folder = Path(finished.run.dir)
    rows = (folder / "metrics.jsonl").read_bytes()
    (folder / "metrics.jsonl").write_bytes(damaged + b"\n" + rows + damaged)
    for name in ("micro_batch.json", "config.json", "status.json", "heartbeats"):
        (folder / name).write_bytes(damaged)
    train(finished)
    assert json.loads((folder / "status.json").read_text())["state"] == "done"
    left = (folder / "metrics.jsonl").read_bytes()
    assert rows in left
    assert all(isinstance(json.loads(line)["step"], int) for line in left.splitlines())
