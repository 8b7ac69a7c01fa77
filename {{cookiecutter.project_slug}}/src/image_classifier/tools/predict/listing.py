"""Which files a command line means: files, folders, patterns, and a list on standard input."""

import glob
import os
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO

from ...config import UserError
from ...data import PathList, has_suffix, walk

LIST = "-"  # in place of a path
READ_BYTES = 2**16  # of a list at once
MOST_NAMELESS = 2**20  # bytes of a list without a name: such as /dev/zero, which never ends
ANY_FOLDERS = b"**"  # in a pattern: none, one or several
FORMULAS = (b"=", b"+", b"-", b"@")  # what a spreadsheet takes for one begins so


def list_files(paths: Sequence[str], stdin: BinaryIO, separator: bytes) -> PathList:
    """The files that `paths` mean, in their order: those of a folder sorted, and all as often.

    In folders and patterns only what is called as an image is; a file that is named is taken, as is
    each of the list on `stdin`, for which `-` stands. Nothing is kept but the names, in one piece.

    Raises:
        UserError: if there is nothing at a path, or nothing in it.
    """
    found = (path for text in paths for path in files_of(text, stdin, separator))
    first = next(found, None)
    if first is None:
        raise UserError("there are no images: name files, folders or 'patterns', or - for a list")

    def all_of_them() -> Iterator[bytes]:
        yield harmless(first)
        yield from map(harmless, found)

    return PathList(Path(), all_of_them())


def harmless(path: bytes) -> bytes:
    """Another path to the same file, if this one would be a formula in a spreadsheet."""
    return b"./" + path if path.startswith(FORMULAS) else path


def files_of(text: str, stdin: BinaryIO, separator: bytes) -> Iterator[bytes]:
    """The files that one word of the command line means.

    Raises:
        UserError: if there are none.
    """
    if text == LIST:
        yield from listed(stdin, separator)
        return
    path = os.fsencode(text)
    if os.path.isdir(path):
        files = walk(path, set())
    elif os.path.isfile(path) or os.path.islink(path):  # a link to nothing is a bad image
        files = iter((path,))
    elif os.path.lexists(path):
        raise UserError(f"{text!a} is neither a file nor a folder")
    elif glob.has_magic(path):
        files = matches(path)
    else:
        raise UserError(f"there is no file or folder {text!a}")
    first = next(files, None)
    if first is None:
        hint = "; ** stands for folders at any depth" if glob.has_magic(path) else ""
        raise UserError(f"{text!a}: there are no images{hint}")
    yield first
    yield from files


def listed(stdin: BinaryIO, separator: bytes) -> Iterator[bytes]:
    """The names of a list, each ended by `separator`, of which the last may have none.

    Raises:
        UserError: if it can't be read, or so much of it has no name that it is no list.
    """
    rest, num_nameless = b"", 0  # bytes since the last name
    try:
        while text := stdin.read(READ_BYTES):
            *names, rest = (rest + text).split(separator)
            names = [*filter(None, names)]
            num_nameless = 0 if names else num_nameless + len(text)
            if num_nameless > MOST_NAMELESS:
                raise UserError(
                    f"the list on standard input has no name in {MOST_NAMELESS / 2**20:g} MiB: "
                    "names end with a newline, or with --null by NUL"
                )
            yield from names
    except OSError as error:
        raise UserError(f"the list on standard input can't be read: {error.strerror}") from error
    if rest:
        yield rest


def matches(pattern: bytes) -> Iterator[bytes]:
    """The image files that a pattern such as `photos/**/*.jpg` matches, sorted."""
    parts = pattern.split(b"/")
    if ANY_FOLDERS not in parts:
        found = sorted(glob.glob(pattern))
        yield from (path for path in found if has_suffix(path) and os.path.isfile(path))
        return
    # `glob` follows links to folders in a circle for as long as the system lets it.
    place = parts.index(ANY_FOLDERS)
    top = b"/".join(parts[:place]) or (b"/" if place else b".")
    for folder in filter(os.path.isdir, sorted(glob.glob(top))):
        skip = len(os.path.join(folder, b""))
        for path in walk(folder, set()):
            if is_match(path[skip:].split(b"/"), parts[place:]):
                yield path if place else path[skip:]


def is_match(path: list[bytes], pattern: list[bytes]) -> bool:
    """Whether a path is one of a pattern; both are in parts."""
    if not pattern or not path:
        return not path and all(part == ANY_FOLDERS for part in pattern)
    if pattern[0] == ANY_FOLDERS:
        return is_match(path, pattern[1:]) or is_match(path[1:], pattern)
    return fnmatchcase(path[0], pattern[0]) and is_match(path[1:], pattern[1:])
