"""scikit-learn in `transfer.py`: logistic regression on frozen features; prints `score N`."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import torchvision
from PIL import Image
from safetensors.torch import load_file
from sklearn.linear_model import LogisticRegressionCV
from sklearn.metrics import average_precision_score
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MultiLabelBinarizer, StandardScaler
from torchvision.transforms import v2

STRENGTHS = [1e-4, 1e-3, 0.01, 0.1, 1.0, 10.0]
SIZE, RESIZE, BATCH = 224, 256, 32


def main() -> None:
    """Learn the task of the file that the command line names."""
    task = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    several = task["is_multi_label"]
    regression: Any = LogisticRegressionCV(
        Cs=STRENGTHS,
        cv=5,
        max_iter=1000,
        scoring="neg_log_loss" if several else "accuracy",
        use_legacy_attributes=False,
    )
    regression = OneVsRestClassifier(regression) if several else regression
    labels = [[row[1] for row in task[part]] for part in ("train", "val")]
    if several:
        binarize = MultiLabelBinarizer(classes=task["classes"])
        train, val = map(binarize.fit_transform, labels)
    else:
        train, val = ([label for (label,) in part] for part in labels)
    model, transform = open_network(task)
    classifier = make_pipeline(StandardScaler(), regression)
    classifier.fit(features(model, transform, task["train"]), train)
    found = features(model, transform, task["val"])
    if several:
        score = average_precision_score(val, classifier.predict_proba(found))
    else:
        score = classifier.score(found, val)
    print("score", 100 * float(score), flush=True)


def open_network(task: dict[str, Any]) -> tuple[torch.nn.Module, v2.Compose]:
    """The network without its last layer, and the transform of its weights."""
    if task["network"] == "mobilenet_v2":
        model = torchvision.models.mobilenet_v2()
        model.load_state_dict(load_file(task["weights"]), strict=False)
        model.classifier = torch.nn.Identity()
        scaling = v2.InterpolationMode.BILINEAR
    else:
        overlay = {"file": task["weights"]}
        model = timm.create_model(
            task["network"], pretrained=True, num_classes=0, pretrained_cfg_overlay=overlay
        )
        scaling = v2.InterpolationMode.BICUBIC
    steps = [
        v2.Resize(RESIZE, interpolation=scaling),
        v2.CenterCrop(SIZE),
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(task["mean"], task["std"]),
    ]
    return model.eval(), v2.Compose(steps)


@torch.inference_mode()
def features(model: torch.nn.Module, transform: v2.Compose, rows: list[Any]) -> np.ndarray:
    """What the last layer of the network gets of images: (count, width) float64."""
    found = []
    for start in range(0, len(rows), BATCH):
        images = [Image.open(path).convert("RGB") for path, _ in rows[start : start + BATCH]]
        found.append(model(torch.stack([transform(image) for image in images])))
    return torch.cat(found).double().numpy()


if __name__ == "__main__":
    main()
