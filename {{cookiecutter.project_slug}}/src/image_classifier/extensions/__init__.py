"""What tools add to the rest: a tool is a folder in `tools/`, and any of them may be deleted.

The rest knows no tool by name: it looks for modules of these names in all of them.

- `command.py` is the command of the tool's name: `main(words) -> exit code`. With
  `RESULT_IS_IN_FILES = True`, or the option that makes it so, lost output is no failure.
- `<verb>_command.py` is the command `<verb>`, of a tool that has several.
- `options.py` adds options: see `options.py` here.
- `api.py` has functions for programs, which may be imported from the package itself.
- `presets.py` adds presets: `PRESETS`, functions that return a `Config`; `change_preset` changes
  those of others; `take_file` turns a file that is named into flags.
- `dataset.py` adds datasets by name: `DATASETS`, as in `data/datasets/`.
- `conversion.py` makes a dataset of what its function returned: `to_source`.
- `labels.py` reads labels from a table, if the options name one: `find_dataset`, `check_files`.
- `folders.py` checks folders of classes: `check_names`, `check_classes`, which returns warnings.
- `division.py` changes which images of a dataset are for which split: `change_split`; and refuses
  what is divided already: `check_own`.
- `source.py` changes a dataset: `without_quarantine` leaves out files, `with_prepared` has others.
- `order.py` changes the order of an epoch, `change_order`, and how much each image counts in the
  loss: `change_weights`.
- `decoder.py` reads files that Pillow does not: `read_array`.
- `unreadable.py` knows a `CURE` for unreadable images, or passes over them: `open_note`.
- `models.py` adds networks by name: `MODELS`, as in `models/`.
- `networks.py` has the models `--model.name <tool>/...`: `build`, `published`, `pretrained_config`;
  and what to do `without_network`.
- `network.py` changes a network: `change_network` and, when it is whole, `wrap_network` for every
  command, `change_training` one that trains, with its images, of which `plain_weights` makes the
  weights of the network without that change.
- `crops.py` changes the crops of training images, which are not normalized yet: `change_crops`;
  one with `crop_on_device` cuts random resized crops from images in memory.
- `policy.py` changes training images before they are normalized: `open_policy`; `key`: its draws.
- `batches.py` changes batches of training, which are normalized: `change_batches`.
- `optimizer.py` is the optimizer of the tool's name: `build_optimizer`.
- `groups.py` divides the weights of an optimizer: `change_groups`.
- `loss.py` changes the loss or the targets: `change_loss`.
- `parallel.py` is another way to train on several ranks: `open_parallel`. If its checkpoints are
  folders, `checkpoints.py` reads them: `read_folder`, `read_whole`.
- `limit.py` has another time limit of a run: `open_limit`.
- `precision.py` measures which number format is faster on a CPU: `find_gain`.
- `decision.py` chooses on the images of an evaluation when predictions count: `choose_decision`. A
  checkpoint keeps it, from which `read_decision` has it; `tell_decision` and `WHAT` say it.
- `observer.py` adds warnings, metrics and sentences to the log, or writes what a run leaves:
  `open_observer`.
- `watcher.py` surrounds the steps of a run, and receives each: `watch`.
- `tracker.py` is the tracker of the tool's name: `open_tracker`, and perhaps `LIBRARY`.
- `head.py` fits the last layer before all layers learn: `fit_head`, and `soften_head`.
- `exports.py` adds options and files to an export: `add_options`, `export_more`.
- `heat.py` shows what the model looked at, for the page of a run: `open_explainer`.
"""

from .finding import (
    chained,
    find_commands,
    find_tool,
    find_tools,
    function,
    functions,
    joined,
    need_tool,
    paths_of,
)
from .options import PLACES, check_ranges, flag, of_tools, option, out_of_range, section, within
