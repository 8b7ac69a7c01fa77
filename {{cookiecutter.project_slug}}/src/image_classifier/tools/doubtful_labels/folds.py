"""What a cross-validation left: its images, and the predictions of runs that did not see them."""

from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor

from ...checkpoints import load_model
from ...config import ComputeConfig, Config, RunConfig
from ...data import Source
from ...errors import UserError
from ...evaluate import keeps_all
from ...metrics import counted_and_correct
from ...runtime.config_dict import of_others, unflatten
from ...runtime.console import say
from ...runtime.distributed import join_world
from ...runtime.files import open_tensors, read_object
from ..cross_validate.cross_validate import open_folds
from ..runs.saved_runs import Run, read_run

AGAIN = "run the same `cross-validate` again"


def read_folds(folder: Path) -> tuple[Config, list[Source], Tensor]:
    """The config, the images of each fold, and the probabilities of all, (count, classes) float32.

    The images are in the order of the folds. Of one that could not be read they are no numbers.

    Raises:
        UserError: if it is not the folder of a whole cross-validation, or its images have changed.
    """
    names = fold_names(folder)
    runs = [read_run(folder / name) for name in names]
    config = read_config(folder / names[0] / "config.json")
    folds = open_folds(config.data, len(runs), config.model.task)
    for run, fold in zip(runs, folds, strict=True):
        check_images(run, fold)
    shares = [probabilities_of(run, fold) for run, fold in zip(runs, folds, strict=True)]
    found = [run.need_predictions() for run in runs]
    is_read = torch.cat([counted_and_correct(own.predicted, own.target)[0] for own in found])
    return config, folds, torch.cat(shares).masked_fill(~is_read[:, None], torch.nan)


def fold_names(folder: Path) -> list[str]:
    """The names of the runs of a cross-validation.

    Raises:
        UserError: if it is none, or some are missing.
    """
    try:
        rows = read_object(folder / "results.json").get("runs")
    except OSError:
        if [*folder.glob("fold-*/")]:
            raise UserError(f"{str(folder)!a}: not all folds are trained: {AGAIN}") from None
        rows = None
    rows = rows if isinstance(rows, list) else []
    count = sum(isinstance(row, dict) and "fold" in row for row in rows)
    if count < 2:
        raise UserError(
            f"{str(folder)!a} is not the folder of a `cross-validate`, whose runs predict each "
            "image once: `cross-validate 5 --data.root FOLDER` trains them"
        )
    names = [f"fold-{number}" for number in range(count)]
    if missing := [name for name in names if not (folder / name / "config.json").is_file()]:
        raise UserError(
            f"{str(folder)!a} has {count - len(missing)} of its {count} folds, not "
            f"{', '.join(missing)}: {AGAIN}"
        )
    return names


def read_config(path: Path) -> Config:
    """The config of a run, without the options of tools that are not here."""
    flat = read_object(path)
    others = of_others(flat)
    return unflatten({knob: value for knob, value in flat.items() if knob not in others})


def check_images(run: Run, fold: Source) -> None:
    """Check that a run has predictions of the images of its fold as they are now.

    Raises:
        UserError: if not.
    """
    if not run.need_predictions().are_of(fold.fingerprint(), fold.file_digests):
        raise UserError(
            f"the images of {str(run.folder)!a}, their labels or the list of those that are left "
            f"out have changed since it was trained: {AGAIN}, with --run.fresh"
        )


def probabilities_of(run: Run, fold: Source) -> Tensor:
    """The probabilities of a fold's images, (count, classes) float32.

    A run of many images and classes saves none: its best weights predict them again.

    Raises:
        UserError: if they are too many for that, too.
    """
    with open_tensors(run.folder / "predictions.safetensors") as file:
        if "probabilities" in file.keys():  # noqa: SIM118 - it is no dict
            return file.get_tensor("probabilities").float()
    if not keeps_all(fold):
        raise UserError(
            f"{str(run.folder)!a}: {len(fold):,} images x {len(fold.classes):,} classes are too "
            "many to rank: cross-validate with more folds, each of which has fewer images"
        )
    say(f"{run.folder} saved no probabilities of all classes: its best weights predict again")
    compute = ComputeConfig()
    with join_world(compute) as world:
        loaded = load_model(str(run.folder), compute, world)
        images = loaded.open_images("val", world, RunConfig(dir=str(run.folder)))
        with closing(images):  # before those of the next fold are opened
            return loaded.evaluate(images).predictions.probabilities
