"""A model card: front matter for Hugging Face, and sections; a file that is not overwritten.

A card ends with a digest of itself, so one that was changed by hand is known.
"""

import hashlib
import math
import re
from pathlib import Path

from ...errors import FaultError, UserError
from ...metrics import METRICS, metric_title
from ...runtime.console import printable
from ...runtime.files import read_plain, write_text
from .facts import Facts, read_facts
from .markup import Yaml, yaml_lines
from .origin import base_of, library_of
from .sections import SECTIONS

TYPES = {"top1": "accuracy", "exact": "accuracy", "macro_f1": "f1", "micro_f1": "f1"}
TYPES |= {"auroc": "roc_auc", "brier": "brier_score"}  # of metrics, as Hugging Face calls them
SEAL = re.compile(rb"\n<!-- model-card ([0-9a-f]{32}) -->\n\Z")  # ends a file of ours: its digest


def write_card(run: str, out: str, license_: str, is_fresh: bool) -> None:
    """Write the card of a run folder to the file `out`, by default its `README.md`.

    Raises:
        UserError: if the run can't be read, or the file is there and is not as it was written.
        FaultError: if the file can't be written.
    """
    if license_ and not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", license_):
        raise UserError(
            f"--license {license_!a} is no identifier such as mit, apache-2.0 or other: see "
            "https://huggingface.co/docs/hub/repositories-licenses"
        )
    path = Path(out) if out else Path(run) / "README.md"
    if path.exists() and not is_fresh and not is_sealed(path):
        raise UserError(
            f"{str(path)!a} is not as model-card has written it: --fresh overwrites it, and "
            "--out FILE writes another file"
        )
    facts = read_facts(Path(run), license_)
    front = ["---", *yaml_lines(front_matter(facts)), "---"]
    sections = filter(None, [section(facts) for section in SECTIONS])
    text = "\n\n".join(["\n".join(front), *sections]) + "\n"
    try:
        write_text(path, f"{text}\n<!-- model-card {digest(text.encode())} -->\n")
    except OSError as error:
        raise FaultError(f"cannot write {str(path)!a}: {error.strerror}") from error
    print(f"{printable(str(path))}: {facts.right} of {facts.right.count:,} validation images right")


def is_sealed(path: Path) -> bool:
    """Whether a file is as this command has written it.

    Raises:
        UserError: if it can't be read.
    """
    try:
        content = read_plain(path)
    except OSError as error:
        raise UserError(f"{str(path)!a} can't be read: {error.strerror}") from error
    found = SEAL.search(content)
    return found is not None and digest(content[: found.start()]) == found[1].decode()


def digest(content: bytes) -> str:
    """Tells whether a card was changed by hand since."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def front_matter(facts: Facts) -> dict[str, Yaml]:
    """What Hugging Face reads: https://huggingface.co/docs/hub/model-cards."""
    library = library_of(facts.config.model.name)
    base = base_of(facts.config)
    results = [result_of(facts, "validation", facts.metrics)]
    if facts.test_metrics:
        results.append(result_of(facts, "test", facts.test_metrics))
    return {
        "library_name": "pytorch",
        "pipeline_tag": "image-classification",
        "tags": ["image-classification", "pytorch", *filter(None, [library])],
        **({"license": facts.license} if facts.license else {}),
        **({"base_model": base.hub} if base.hub else {}),
        "model-index": [{"name": facts.name, "results": results}],
    }


def result_of(facts: Facts, split: str, metrics: dict[str, float]) -> dict[str, Yaml]:
    """The metrics of a split as the model index has them."""
    data = facts.config.data
    kind = "imagefolder" if data.name == "folder" else data.name
    return {
        "task": {"type": "image-classification"},
        "dataset": {"type": kind, "name": facts.dataset, "split": split},
        "metrics": [
            {
                "type": TYPES.get(name, name),
                "name": metric_title(name),
                "value": round(metrics[name], 4),
            }
            for name in METRICS
            if math.isfinite(metrics.get(name, math.nan))
        ],
    }
