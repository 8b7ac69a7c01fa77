"""`preview`: a picture of training images as augmentation changes them, before any training."""

from dataclasses import dataclass, replace

from ...config import Config
from ...extensions import within
from ...runtime.command_line import command, parse, summary, take_preset
from ...runtime.config_dict import sections
from ...runtime.launch import run_in_processes

RESULT_IS_IN_FILES = True


@dataclass(frozen=True)
class PreviewOptions(Config):
    """What the picture shows, and every knob of training."""

    columns: int = within(8, 1, 64)  # images, one a column
    rows: int = within(6, 1, 64)  # epochs, one a row, below the images as they are


def main(words: list[str]) -> int:
    """Draw training images as the model will see them: `preview [PRESET] [--FLAG VALUE ...]`."""
    name, preset = take_preset(words, "shapes", "runs/preview")
    default = PreviewOptions(**sections(preset))
    prog = f"{command('preview')} {name}"
    options = parse(PreviewOptions, words, prog=prog, about=summary(main), default=default)
    config = Config(**sections(options))

    def work() -> None:
        from .preview import preview

        preview(config, options.columns, options.rows)

    return run_in_processes(work, replace(config.run, processes=1), config.compute)
