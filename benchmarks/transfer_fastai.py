"""fastai in `transfer.py`: `vision_learner(...).fine_tune(5)`; a line `score N` an evaluation."""

import json
import sys
from pathlib import Path
from typing import Any

from fastai.vision import all as fast
from safetensors.torch import load_file
from torchvision.models import mobilenet_v2

EPOCHS = 5  # after one in which the new layers learn alone
SIZE, PRESIZE, BATCH = 224, 288, 32


class Scores(fast.Callback):
    """Prints the score of each evaluation."""

    order = 60  # after the recorder

    def after_epoch(self) -> None:
        """After the evaluation."""
        print("score", 100 * float(self.recorder.values[-1][-1]), flush=True)


def main() -> None:
    """Learn the task of the file that the command line names."""
    task = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    fast.set_seed(task["seed"], reproducible=True)
    rows, several = [*task["train"], *task["val"]], task["is_multi_label"]
    kind = fast.MultiCategoryBlock if several else fast.CategoryBlock
    block = fast.DataBlock(
        (fast.ImageBlock, kind(vocab=task["classes"])),
        get_x=lambda row: row[0],
        get_y=lambda row: row[1] if several else row[1][0],
        splitter=fast.IndexSplitter(range(len(task["train"]), len(rows))),
        item_tfms=fast.Resize(PRESIZE),
        batch_tfms=[
            *fast.aug_transforms(size=SIZE, min_scale=0.75),
            fast.Normalize.from_stats(task["mean"], task["std"]),
        ],
    )
    loaders = block.dataloaders(rows, bs=BATCH, num_workers=0)
    learner = open_learner(loaders, task, fast.APScoreMulti() if several else fast.accuracy)
    with learner.no_bar(), learner.no_logging():
        learner.fine_tune(EPOCHS, cbs=Scores())


def open_learner(loaders: Any, task: dict[str, Any], metric: Any) -> Any:  # noqa: ANN401 - fastai's
    """A learner with the weights of the task, all but the new layers frozen."""
    if task["network"] != "mobilenet_v2":
        overlay = {"file": task["weights"]}
        return fast.vision_learner(
            loaders,
            task["network"],
            pretrained_cfg_overlay=overlay,
            metrics=metric,
            normalize=False,
        )
    # `vision_learner` looks for a pooling layer to cut at; this network's pooling is a function.
    body = fast.create_body(mobilenet_v2(), pretrained=False, cut=-1)
    weights = load_file(task["weights"])
    features = {
        name.removeprefix("features."): weight
        for name, weight in weights.items()
        if name.startswith("features.")
    }
    body[0].load_state_dict(features)
    model = fast.add_head(body, fast.num_features_model(body), loaders.c)
    learner = fast.Learner(loaders, model, splitter=fast.default_split, metrics=metric)
    learner.freeze()
    return learner


if __name__ == "__main__":
    main()
