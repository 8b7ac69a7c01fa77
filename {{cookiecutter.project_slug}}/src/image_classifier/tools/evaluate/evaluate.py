"""Scores of the best weights of a run."""

from dataclasses import replace
from pathlib import Path

from ...checkpoints import LoadedModel, load_model
from ...config import ComputeConfig, DataConfig, RunConfig
from ...data import ALL, WrapperError, are_in_folders, find_folders, find_name, open_dataset
from ...errors import UserError
from ...evaluate import Scores
from ...extensions import need_tool
from ...runtime.distributed import join_world
from ...runtime.out_of_memory import smaller_batch_on_oom
from ...tasks import metric_of


def evaluate_run(run: str, split: str, root: str, compute: ComputeConfig, size: int = 0) -> Scores:
    """Print the scores of the best weights of the run or checkpoint `run`, `size` images at once.

    With several processes, of all of them together; 0: as many as in training.

    Raises:
        UserError: if there is no such run, or its images are missing or of other classes.
        FaultError: if memory does not suffice, too many cannot be read, or a worker was killed.
    """
    with join_world(compute) as world:
        loaded = load_model(run, compute, world)
        data = loaded.config.data
        data = replace(data, batch_size=size or data.batch_size)
        if root:
            split = split_of(data := in_folder(data, root), split, loaded)
        if split == ALL:
            data = replace(data, limit=0, cache="")  # there is a list of others to leave out
        own = RunConfig(dir=run if Path(run).is_dir() and not root else "")
        images = loaded.open_images(split, world, own, data)
        with smaller_batch_on_oom("--batch-size", images.batch_size * world.size):
            scores = loaded.evaluate(images)
        if world.is_main:
            text = scores.text(metric_of(loaded.config), loaded.decision)
            print(*images.source.notes, text, sep="\n")
            whole = f"all {len(images):,} images in {root!a}"
            which = whole if split == ALL else f"{len(images):,} {split} images"
            print(f"{which}, weights {loaded.origin} from {str(loaded.path)!a}")
    return scores


def in_folder(data: DataConfig, root: str) -> DataConfig:
    """`data` in the folder `root`, which has a table of its own where that of `data` has one."""
    labels = getattr(data, "labels", "")
    if labels and Path(labels).is_relative_to(data.root):
        data = replace(data, labels=str(Path(root, Path(labels).relative_to(data.root))))
    return replace(data, root=root)


def split_of(data: DataConfig, split: str, loaded: LoadedModel) -> str:
    """`split`; or all images, if `data` has no parts and is not that of the training.

    Raises:
        UserError: if the table of the labels can't be used.
        WrapperError: if the classes are in a folder in `data.root`.
    """
    place = Path(data.root)
    trained_in = Path(loaded.config.data.root)
    if data.name != "folder" or not place.is_dir():
        return split
    if not are_in_folders(data):
        if need_tool("labels", "label-table", "a table of labels").has_parts(data):
            return split
    elif parts := find_folders(place):  # the only one of them is meant
        return next(iter(parts)) if len(parts) == 1 and "train" not in parts else split
    if trained_in.is_dir() and place.samefile(trained_in):
        return split
    try:  # it may have moved
        moved = open_dataset(data, "train")
        found = moved.fitted(loaded.config.model.task, "train").fingerprint()
    except UserError as error:
        is_known = any(find_name(path.name, loaded.classes) >= 0 for path in place.iterdir())
        if isinstance(error, WrapperError) and not is_known:
            raise
        return ALL
    return split if found.partition(" ")[0] == loaded.fingerprint.partition(" ")[0] else ALL
