"""Write several runs as the checkpoint of one model, which all commands read as that of a run."""

import math
import shlex
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median, median_low

import torch
from torch import Tensor

from ...checkpoints import Best, first_reason
from ...config import ComputeConfig, Config
from ...errors import UserError
from ...metrics import THRESHOLD, Decision
from ...models import build_model, load_weights
from ...runtime.command_line import command
from ...runtime.config_dict import to_save
from ...runtime.distributed import World
from ...runtime.files import write_whole
from ...runtime.run_dir import open_run
from .command import EnsembleOptions
from .members import load_members, other_knob
from .soup import IMAGES, average_weights


def ensemble(options: EnsembleOptions, compute: ComputeConfig) -> None:
    """Make one model of `options.runs` in the new run folder `options.dir`, and say how to use it.

    Averaged weights that gain nothing are not written.

    Raises:
        UserError: if the runs can't be read or do not fit together, or the folder is not new.
    """
    folder = Path(options.dir)
    check_new(folder)  # before the work, and again when nobody else can write there
    members = load_members(options.runs)
    first = members[0]
    config = replace(first.config, run=replace(first.config.run, dir=options.dir, fresh=False))
    if options.average == "weights":
        found = average_weights(members, compute)
        if found is None:
            return
        weights, decision = found
    else:
        joined = join(members)
        config = replace(config, model=joined.config.model)
        weights = joined.weights
        decision = joined.decision
    check_weights(config, weights, first)
    with open_run(config, World(torch.device("cpu"))):
        check_new(folder)
        path = write_checkpoint(config, weights, decision, members)
    print(
        f"{len(members)} runs are one model, by the mean of their {options.average}: {str(path)!a}"
    )
    if count := sum(bool(other_knob(first, member, IMAGES)) for member in members):
        print(
            f"{count} of them were validated on other images, and may have learned from those of "
            f"{str(first.path)!a}: judge the model by images that no run has seen"
        )
    here = shlex.quote(options.dir)
    print(f"  {command('evaluate')} {here} --root PHOTOS")
    print(f"  {command('predict')} {here} PHOTO.jpg")


def check_new(folder: Path) -> None:
    """Raise `UserError` if a folder holds more than a lock and what a killed command has left."""
    left = [path for path in folder.rglob("[!.]*") if path.is_file()]
    if left:
        name = left[0].relative_to(folder)
        raise UserError(
            f"--dir {str(folder)!a} is not empty: it has {str(name)!a}; take another --dir, or "
            "delete it"
        )


def join(members: list[Best]) -> Best:
    """The members as one model, of the mean of their probabilities."""
    first = members[0]
    model = replace(first.config.model, members=len(members))
    return replace(
        first,
        config=replace(first.config, model=model),
        weights=join_weights(members),
        decision=join_decisions(members),
    )


def join_weights(members: list[Best]) -> dict[str, Tensor]:
    """The weights of a network that `wrap_network` makes: all members', and what sets them apart.

    Images are normalized as for the first.
    """
    weights = {
        f"members.{number}.{name}": weight
        for number, member in enumerate(members)
        for name, weight in member.weights.items()
    }
    mean, std = (
        torch.tensor([getattr(m, name) for m in members]).double() for name in ("mean", "std")
    )
    weights["scale"] = (std[0] / std).float()
    weights["shift"] = ((mean[0] - mean) / std).float()
    weights["temperature"] = torch.tensor([member.decision.temperature for member in members])
    return weights


def join_decisions(members: list[Best]) -> Decision:
    """When a prediction of the ensemble counts; its probabilities are calibrated already.

    A threshold is the median of the members': one that says "never" does not decide alone.
    """
    has_several = members[0].config.model.task == "multi-label"
    usual = (THRESHOLD,) * len(members[0].classes) if has_several else (0.0,)
    each = [member.decision.thresholds for member in members]
    if not any(each):
        return Decision()
    columns = zip(*(thresholds or usual for thresholds in each), strict=True)
    return Decision(thresholds=tuple(map(join_thresholds, columns)))


def join_thresholds(thresholds: tuple[float, ...]) -> float:
    """The threshold of an ensemble from those of its members; more than 1 is "never"."""
    middle = median(thresholds)
    return middle if middle < 1 else median_low(thresholds)


def check_weights(config: Config, weights: dict[str, Tensor], first: Best) -> None:
    """Raise `UserError` if the network of `config` can't have these weights."""
    data = config.data
    classes = first.classes
    network = build_model(config.model, len(classes), data.image_size, data.channels)
    try:
        load_weights(network, weights)
    except RuntimeError as error:
        path = ascii(str(first.path))
        raise UserError(f"{path} holds another model: {first_reason(error)}") from error


def write_checkpoint(
    config: Config, weights: dict[str, Tensor], decision: Decision, members: list[Best]
) -> Path:
    """Write `best.pt` of the run folder of `config`, whole or not at all; returns its path."""
    first = members[0]
    state = {"model": weights, "ema": None, "optimizer": {}, "scaler": {}}
    state |= {"step": first.step, "best_score": math.nan, "best_step": first.step, "num_worse": 0}
    state["decision"] = asdict(decision)
    saved = {
        "state": state,
        "config": to_save(config),
        "classes": list(first.classes),
        "mean": list(first.mean),
        "std": list(first.std),
        "fingerprint": first.fingerprint,
        "files": {},
        "teacher": "",
        "report": {"loss": math.nan, "step": first.step},
        "torch": str(torch.__version__),
        "members": [member.digest for member in members],
    }
    path = Path(config.run.dir, "checkpoints", "best.pt")
    path.parent.mkdir(exist_ok=True)
    write_whole(path, lambda file: torch.save(saved, file))
    return path
