"""Scores of the best weights of a run."""

from dataclasses import replace
from pathlib import Path

from ...config import ComputeConfig, RunConfig
from ...data import EvalData
from ...evaluate import Scores, evaluate
from ...runtime.distributed import join_world
from ...tasks import metric_of
from ..loaded_model import load_model


def evaluate_run(run: str, split: str, root: str, compute: ComputeConfig) -> Scores:
    """Evaluate the best weights of the run folder or checkpoint `run`, and print the scores.

    Raises:
        UserError: if there is no such run, or its images are missing or of other classes.
    """
    with join_world(compute) as world:
        loaded = load_model(run, compute, world)
        data = replace(loaded.config.data, root=root or loaded.config.data.root)
        folder = run if Path(run).is_dir() else ""
        task, mean_std = loaded.config.model.task, (loaded.mean, loaded.std)
        own = RunConfig(dir=folder)
        images = EvalData(data, split, world, own, task=task, mean_std=mean_std)
        loaded.check_images(images.source, split)
        scores = evaluate(loaded.model, images, loaded.normalize, loaded.precision, world)
        if world.is_main:
            for note in images.source.notes:
                print(note)
            print(scores.text(metric_of(loaded.config), loaded.decision))
            print(
                f"{len(images):,} {split} images, weights {loaded.origin} from {str(loaded.path)!a}"
            )
    return scores
