"""What is said of an image: a row of the output, and what `load(run).predict` returns."""

from typing import Any

from torch import Tensor

from ...checkpoints import LoadedModel

ABSTAIN = "abstain"  # in the place of a prediction that does not count

Row = dict[str, Any]  # path, label, probability, top: a list of these two, error; None: unknown; of
# models that know several labels also `labels`, those that the image has; of models with a
# threshold also `decision`: the label, or that it abstains
EXTRA = {"labels", "decision"}
NO_ROW: Row = {"path": "", "label": None, "probability": None, "top": [], "error": None}


def judge(trained: LoadedModel, logits: Tensor, top_k: int) -> list[Row]:
    """Rows of images, without their paths, by their (count, classes) logits."""
    decision = trained.decision
    has_several = trained.config.model.task == "multi-label"
    probabilities = trained.probabilities(logits)
    best = probabilities.topk(top_k)
    chosen = (decision.has_label if has_several else decision.is_sure)(probabilities)
    found = zip(best.values.tolist(), best.indices.tolist(), chosen.tolist(), strict=True)
    rows: list[Row] = []
    for shares, classes, own in found:
        # Nine digits tell a float32 from the next.
        pairs = zip((trained.classes[n] for n in classes), shares, strict=True)
        top = [{"label": name, "probability": float(f"{p:.9g}")} for name, p in pairs]
        row = NO_ROW | top[0] | {"top": top}
        if has_several:
            pairs = zip(trained.classes, own, strict=True)
            row["labels"] = [name for name, is_there in pairs if is_there]
        elif decision.thresholds:
            row["decision"] = row["label"] if own else ABSTAIN
        rows.append(row)
    return rows


def unread(row: Row, error: str) -> Row:
    """The row of an image that can't be read, whose pixels were black."""
    found = {"path": row["path"], "error": error.partition(": --data.")[0]}  # no option of training
    return row | dict.fromkeys(row.keys() & EXTRA) | NO_ROW | found
