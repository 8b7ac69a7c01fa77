"""`model-card`: a page on a trained model, in the form that Hugging Face reads."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from ...extensions import need_tool
from ...runtime.command_line import command, parse, summary
from ...runtime.launch import attempt

RESULT_IS_IN_FILES = True


@dataclass(frozen=True)
class ModelCardOptions:
    """Which run, and what its files do not say."""

    run: Annotated[str, tyro.conf.Positional]  # run folder
    out: str = ""  # file to write; default: README.md in the run folder
    license: str = ""  # under which you publish the model: an identifier of
    # https://huggingface.co/docs/hub/repositories-licenses, such as mit, apache-2.0 or other
    fresh: bool = False  # overwrite a file that this command has not written, or that was changed


def main(words: list[str]) -> int:
    """Write a model card from the files of a run: `model-card RUN [--license mit]`."""
    options = parse(ModelCardOptions, words, prog=command("model-card"), about=summary(main))

    def work() -> None:
        need_tool("presets", "config-file", "model-card")
        need_tool("saved_runs", "runs", "model-card")
        from .card import write_card

        write_card(options.run, options.out, options.license, options.fresh)

    return attempt(work)
