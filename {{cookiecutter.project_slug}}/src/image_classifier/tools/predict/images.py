"""The images of `predict`: files, folders, patterns or a list, decoded as for an evaluation."""

import codecs
import glob
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import torch

from ...checkpoints import LoadedModel
from ...data import Batch, PathList, Samples, Source, has_suffix, open_loader, prefetched, walk
from ...errors import UserError
from ...runtime.console import printable
from ...runtime.distributed import World

LIST = "-"  # in place of a path
FEW = 8  # images for each worker, at least
SHOWN = 5  # suffixes of files that are left out


class Images:
    """Files as batches on the device, each once and in their order."""

    def __init__(
        self,
        files: PathList,
        trained: LoadedModel,
        batch_size: int,
        workers: int | str,
        world: World,
    ) -> None:
        """Preprocess `files` as the evaluation of `trained` does."""
        self.world = world
        self.batch_size = min(batch_size, len(files))
        data = replace(
            trained.config.data,
            image_size=trained.config.data.eval_size,
            batch_size=self.batch_size,
            workers=workers if workers == "auto" else min(workers, len(files) // FEW),
        )
        labels = torch.zeros(1, dtype=torch.int64).expand(len(files))  # nobody knows them
        kind = {"channels": data.channels, "bits": data.bits, "mean": trained.mean}
        self.source = Source(labels, trained.classes, paths=files, std=trained.std, **kind)
        samples = Samples(self.source, data)
        self.errors: dict[int, str] = {}  # why images cannot be read, by their numbers
        self.loader, _ = open_loader(samples, data, world, self.errors.__setitem__)

    def batches(self, first: int) -> Iterator[tuple[int, Batch]]:
        """The batches from image `first` on, each with the number of its first image."""
        count = len(self.source)
        starts = range(first, count, self.batch_size)
        indices = ((0, torch.arange(n, min(n + self.batch_size, count))) for n in starts)
        yield from zip(starts, prefetched(self.loader.begin(indices), self.world), strict=True)

    def close(self) -> None:
        """End the workers."""
        self.loader.close()


def list_files(paths: Sequence[str], stdin: BinaryIO, separator: bytes) -> PathList:
    """The files that the words `paths` of a command line name, in their order.

    Only the names are kept, in one array. A line counts the files in folders that are no images.

    Raises:
        UserError: if there is nothing at a path, or no image at all.
    """
    others = Counter()  # by their suffix
    found = (path for text in paths for path in files_of(text, stdin, separator, others))
    first = next(found, None)
    if first is None:
        raise UserError("there are no images: name files, folders or 'patterns', or - for a list")
    files = PathList(Path(), chain((first,), found))
    if others:
        kinds = [f"{n:,} {printable(kind) or 'without one'}" for kind, n in others.most_common()]
        kinds = ", ".join(kinds[:SHOWN]) + ", ..." * (len(kinds) > SHOWN)
        said = f"left out by their suffix: {kinds}; a file that you name is read"
        print(f"{others.total():,} files in folders are {said}", file=sys.stderr)
    return files


def files_of(text: str, stdin: BinaryIO, separator: bytes, others: Counter[str]) -> Iterator[bytes]:
    """The files that one word names: a file, a folder, a pattern, or `-` for a list on `stdin`.

    In folders and patterns only files with the suffix of an image count, sorted, and what is hidden
    only if a pattern says so; a file that is named is taken whatever its suffix.
    """
    path = os.fsencode(text)
    if text == LIST:
        names = stdin.read().removeprefix(codecs.BOM_UTF8).split(separator)
        if any(b"\0" in name for name in names):
            raise UserError("a name on standard input has NUL in it: --null is for such lists")
        has_returns = separator == b"\n" and all(n.endswith(b"\r") for n in names[:-1])
        yield from filter(None, (n.removesuffix(b"\r") if has_returns else n for n in names))
    elif os.path.isdir(path):
        yield from walk(path, others)
    elif os.path.lexists(path):
        yield path
    elif glob.has_magic(text):
        # Not `glob.glob`, whose `**` follows links to folders, some of which are loops.
        pattern = Path(text + "/*" if text.endswith("**") else text)
        found = Path(pattern.anchor or ".").glob(str(pattern.relative_to(pattern.anchor)))
        most = num_hidden(pattern)
        try:
            shown = [os.fsencode(p) for p in found if num_hidden(p) <= most and p.is_file()]
        except ValueError as error:  # `**` beside other letters, up to Python 3.12
            raise UserError(f"pattern {text!a}: {error}; such as 'photos/**/*.jpg'") from error
        yield from sorted(filter(has_suffix, shown))
    else:
        raise UserError(f"there is no file or folder {text!a}")


def num_hidden(path: Path) -> int:
    """How many parts of a path or a pattern begin with a dot."""
    return sum(part.startswith(".") for part in path.parts)
