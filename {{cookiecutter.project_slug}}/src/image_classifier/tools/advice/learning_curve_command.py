"""`learning-curve`: would more images help, or larger ones."""

from ...config import Config
from ...extensions import need_tool
from ...runtime.command_line import command, parse, summary, take_preset
from ...runtime.launch import attempt

RESULT_IS_IN_FILES = True
OTHERWISE = "finetune"  # the preset if none is named: it has trained weights


def main(words: list[str]) -> int:
    """Would more images help, or larger ones: `learning-curve [PRESET] --data.root FOLDER`."""
    name, preset = take_preset(words, OTHERWISE, "runs/learning-curve/{}")
    prog = f"{command('learning-curve')} {name}"
    config = parse(Config, words, prog=prog, about=summary(main), default=preset)

    def work() -> None:
        need_tool("head", "linear-probe", "learning-curve")
        from .learning_curve import learning_curve

        learning_curve(config)

    return attempt(work)
