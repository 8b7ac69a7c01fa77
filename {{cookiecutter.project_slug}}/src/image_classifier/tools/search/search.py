"""Search for better values of knobs on Ray Tune: trials are ordinary runs, in a folder each.

What a trial tries is written before it starts. So a killed search goes on: it proposes the same
again, reports the evaluations that are there, and trains only what is missing.
"""

import json
import logging
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray
import torch
from ray import tune
from ray.tune.search import Searcher

from ...config import FREE_TO_CHANGE
from ...errors import UserError, choose
from ...extensions import find_tool
from ...runtime.config_dict import words_of
from ...runtime.console import say
from ...runtime.distributed import World
from ...runtime.files import read_object, write_json
from ...runtime.run_dir import open_run
from ...runtime.signals import TIME_LIMIT, StoppedError
from ..ray_train.cluster import start_ray
from ..runs.compare import compare
from ..runs.many_runs import train_all
from ..runs.saved_runs import are_same, images_of
from .command import SearchOptions
from .engines import GOAL, Distributions, Knobs, build_engine, open_space
from .job import Job, build_scheduler, plan
from .results import Trial, best_of, read_trials, recorded_knobs, table_of
from .spaces import SPACES
from .trial import RECORD, Proposals, RunTrial, remove


def search(preset: str, options: SearchOptions, changed: Knobs) -> None:
    """Search, print a table, and write `results.json` to the search folder.

    `changed` has the knobs in which all trials differ from the preset.

    Raises:
        UserError: if the space, the engine, the machine or the folder cannot be used.
        FaultError: if no trial was evaluated, or the time limit ended runs.
    """
    job = plan(preset, options, changed)
    config = job.recipe.config
    space_name = options.space or (preset if preset in SPACES else "default")
    space = open_space(choose("search space", space_name, SPACES)(config), config)
    knobs = {} if callable(space) else {knob: str(found) for knob, found in space.items()}
    fixed = {knob: v for knob, v in changed.items() if not knob.startswith(FREE_TO_CHANGE)}
    about = {"preset": preset, "changed": fixed, "space": space_name, "knobs": knobs}
    images = {split: images_of(config, split) for split in ("train", "val")}
    about |= {"init_from": config.run.init_from, "images": images}
    folder = job.recipe.folder
    with open_run(config, World(torch.device("cpu"))):
        recorded = [] if options.run.fresh else earlier(folder, about)
        engine = build_engine(options.search, space, recorded, options.trials, options.seed)
        if options.run.fresh:
            clear(folder)
        write_json(folder / "search.json", about)
        say(
            f"{options.trials} trials of {preset}, {job.recipe.at_once} at once: {options.search}, "
            f"{options.scheduler}; space {space_name}; {len(recorded)} were begun before"
        )
        say("\n".join(f"  {knob}: {text}" for knob, text in knobs.items()))
        run_trials(job, engine)
        best = report(job, space)
        if options.confirm:
            confirm(job, best)
        else:
            count = len(read_trials(folder, job.metric))
            say(f"The best of {count} may be luck: add --confirm 5 to this command.")


def clear(folder: Path) -> None:
    """Delete the trials of an earlier search, and nothing else that may lie there."""
    for record in sorted(folder.glob(f"[0-9][0-9][0-9]*/{RECORD}")):
        remove(record.parent)
    if (folder / "search.json").exists():
        shutil.rmtree(folder / "confirm", ignore_errors=True)


def earlier(folder: Path, about: dict[str, Any]) -> list[Knobs]:
    """What an earlier search has proposed, in its order.

    Raises:
        UserError: if the folder holds a search for something else than `about` says.
    """
    path = folder / "search.json"
    saved = about | (read_object(path) if path.exists() else {})
    images = saved.pop("images")
    are_others = not all(are_same(images[split], now) for split, now in about["images"].items())
    known = json.loads(json.dumps(about))
    del known["images"]
    if are_others or saved != known:
        raise UserError(
            f"{str(folder)!a} holds a search with another preset, space or config, or other images:"
            " set another --run.dir, or --run.fresh to delete it"
        )
    return recorded_knobs(folder)


def run_trials(job: Job, engine: Searcher) -> None:
    """Run trials until all have ended, each in a folder, on a Ray cluster of their size.

    Raises:
        FaultError: if Ray does not start.
        StoppedError: if the time limit ended runs; all saved.
    """
    start_ray(
        job.recipe.at_once * job.options.cpus,
        num_gpus=torch.cuda.device_count() if job.options.gpus else 0,
        object_store_memory=100 * 2**20,  # nearly the least: trials exchange files, no objects
        log_to_driver=False,
        logging_level=logging.CRITICAL,
    )
    trials = job.options.trials
    share = {"cpu": job.options.cpus, "gpu": job.options.gpus}
    own = tune.CheckpointConfig(checkpoint_at_end=False)  # a run has its own checkpoints
    try:
        with TemporaryDirectory() as storage:  # Ray's own records: of this start alone
            tune.Tuner(
                tune.with_resources(tune.with_parameters(RunTrial, job=job), share),
                tune_config=tune.TuneConfig(
                    num_samples=trials,
                    search_alg=Proposals(engine, job),
                    scheduler=build_scheduler(job),
                    max_concurrent_trials=job.recipe.at_once,
                    reuse_actors=True,
                    **GOAL,
                ),
                run_config=tune.RunConfig(storage_path=storage, verbose=0, checkpoint_config=own),
            ).fit()
    finally:
        ray.shutdown()
    states = [trial.state for trial in read_trials(job.recipe.folder, job.metric)]
    if saved := states.count("saved"):
        account = f"{trials - saved} of {trials} trials in {job.recipe.folder} have ended"
        again = f"run the same command{', without --run.fresh,' * job.options.run.fresh}"
        raise StoppedError(TIME_LIMIT, f"{account}, the others saved; {again} to resume")


def report(job: Job, space: Distributions) -> Trial:
    """Print the trials and the best one's command, and write them; the best one.

    Raises:
        FaultError: if no trial was evaluated.
    """
    trials = read_trials(job.recipe.folder, job.metric)
    best = best_of(trials)
    words = [job.recipe.preset, *words_of(job.recipe.changed | best.knobs)]
    command = shlex.join(["python", "train.py", *words])
    write_json(
        job.recipe.folder / "results.json",
        {"best": best.number, "command": command, "trials": [vars(trial) for trial in trials]},
    )
    summary = f"{table_of(trials, job.options.epochs)}\nbest: trial {best.number:03}: {command}"
    title = f"Search: {len(trials)} trials of {job.recipe.preset}"
    say(f"\n{summary}\nwritten: {job.recipe.folder}/results.json")
    if page := find_tool("trials_page", "search-page"):
        page.write_page(job.recipe.folder, title, trials, summary, space)
    return best


def confirm(job: Job, best: Trial) -> None:
    """Train the preset's config and the best one with the same fresh seeds, and compare them.

    Raises:
        FaultError: if a run failed, or a signal or the time limit ended this.
    """
    seeds = range(job.options.seed + 1, job.options.seed + 1 + job.options.confirm)
    groups = []
    for name, own in (("preset", {}), (f"trial-{best.number:03}", best.knobs)):
        run = replace(job.recipe.config.run, dir=str(job.recipe.folder / "confirm" / name))
        recipe = replace(job.recipe, config=replace(job.recipe.config, run=run))
        train_all(recipe, {f"seed-{seed}": own | {"seed": seed} for seed in seeds})
        groups.append(run.dir)
    compare(groups)
