"""Images in tar shards, in the layout of WebDataset.

    root/train-000000.tar ...     or root/train/*.tar; val, valid or validation; perhaps test
    root/classes.txt              perhaps: the name of each class, in a line

An image is a member such as `ant/1.jpg`. Its label is in `ant/1.cls`: a number or a name; or in
`ant/1.json`: the value of "label", or "labels", a list; or else it is the folder, `ant`.
Of `1.left.jpg` it is in `1.left.cls` or else in `1.cls`.
`root` may be anything that fsspec can read: `s3://bucket/folder`, `gs://`, `http://`.
"""

from ...config import DataConfig
from ...data import Source, divide
from ...errors import UserError
from ...runtime.console import printable
from ..dataset_formats.labels import numbered
from ..dataset_formats.parts import choose_part
from .index import open_index
from .members import Members
from .storage import Storage


def tar(data: DataConfig, split: str) -> Source:
    """The images in the shards of `split`, in their order there.

    Without shards for validation, a hash of each image's name divides those for training, as for
    images in folders; or of its shard and name, where shards have the same names.

    Raises:
        UserError: if there are no shards, or one is damaged, or a label is missing or unknown.
        FaultError: if they can't be read, after several attempts.
    """
    storage = Storage(data.root)
    parts = storage.find_parts()
    part, is_divided = choose_part(parts, data, split)
    index = open_index(storage, parts[part], data)
    if (names := storage.read_lines("classes.txt")) is None:
        train = "train" if "train" in parts else part
        own = index if train == part else open_index(storage, parts[train], data)
        _, names = numbered(own.labels)
    try:
        labels, names = numbered(index.labels, tuple(map(printable, names)))
    except UserError as error:
        raise UserError(f"the {part} shards in {data.root!a}: {error}") from error
    members = Members(storage, index)
    source = Source(labels[index.arrays["label"]], names, paths=members, notes=index.notes)
    if not is_divided:
        return source
    own = [*index.names(members.numbers)]
    if len({*own}) < len(own):
        own = members.relatives(members.numbers)
    return source.picked(divide(own, source.labels, data, split))


DATASETS = {"tar": tar}
