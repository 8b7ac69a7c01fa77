"""`--data.labels` and `--data.columns`."""

from dataclasses import dataclass

from ...errors import UserError


@dataclass(frozen=True)
class LabelTableOptions:
    """The table of labels."""

    labels: str = ""  # table of your own images, .csv, .tsv or .jsonl, in place of folders:
    # path,label[,split][,fold][,weight][,group]; a|b are two labels; paths: absolute or from `root`
    columns: tuple[str, ...] = ()  # columns of that table by other names: path=Image label=Id


SECTIONS = {"images": LabelTableOptions}
FREE_TO_CHANGE = ("data.labels", "data.columns")


def check(config: object) -> None:
    """Raise `UserError` for a table of images that are no files, or columns of none."""
    data = config.data
    if data.labels and data.name != "folder":
        raise UserError(f"--data.labels is for --data.name folder, not for {data.name}")
    if data.columns and not data.labels:
        raise UserError("--data.columns names the columns of a table: --data.labels FILE")
