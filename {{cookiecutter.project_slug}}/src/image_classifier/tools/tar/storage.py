"""Files on this machine, or wherever fsspec reads from: listed, described, and read in part."""

import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, TypeVar

from ...data import part_of, role_of
from ...errors import FaultError, UserError
from ...runtime.files import open_plain

T = TypeVar("T")

LOCK = threading.Lock()
GONE = 404, 410, 416  # HTTP: not found, gone, no such range
PACKED = re.compile(r"\.(tgz|tbz2?|txz|tar\.(gz|bz2|xz|zst|lz4|lzma|Z))$")
WAITS = 0.5, 1.0, 2.0, 4.0  # seconds between attempts to read from elsewhere
REQUESTS = 8  # of a process, at once
MOST_OPEN = 256  # files that a process keeps open
RECHECK_SECONDS = 5.0  # between two looks at a file elsewhere, where answers do not tell its state
# What tells whether a file has changed, by the names that file systems give it.
STAMPS = ("mtime", "ETag", "etag", "md5Hash", "Last-Modified", "LastModified", "created")


class Storage:
    """The files below a root. All threads of a process share it; forked processes each have own."""

    def __init__(self, root: str) -> None:
        """Files below `root`, a folder or a URL."""
        self.root = root
        self.is_local = "://" not in root
        self.url = os.path.abspath(root) if self.is_local else root  # `~` is a name here
        # Open files, with size and time of change; reading moves no place in them.
        self.files: dict[str, tuple[BinaryIO, tuple[int, int]]] = {}
        self.described: dict[str, tuple[int, dict[str, str]]] = {}  # sizes and stamps
        self.checked: dict[str, float] = {}  # when files elsewhere were last described
        self.has_given_up = False
        self.pid = 0

    def __del__(self) -> None:
        for file, _ in self.files.values():
            file.close()

    def here(self) -> "Storage":
        """This, with all that a process may not take over from its parent."""
        if self.pid != os.getpid():
            from fsspec.core import url_to_fs

            try:
                self.fs, self.path = url_to_fs(self.url)
            except (ImportError, ValueError) as error:  # a library for it is missing
                raise UserError(f"--data.root {self.root!a}: {error}") from error
            self.path = self.path.rstrip("/")
            self.requests = ThreadPoolExecutor(REQUESTS)
            self.thread = threading.local()
            self.pid = os.getpid()
        return self

    def __getstate__(self) -> dict[str, Any]:
        """For a process that was not forked from this one."""
        return self.__dict__ | {"files": {}, "pid": 0, "fs": None, "requests": None, "thread": None}

    def find_parts(self) -> dict[str, list[str]]:
        """The shards of each part, train, val and so on, sorted; all are `train` without parts."""
        is_file = PACKED.sub(".tar", self.root).endswith(".tar")
        if is_file and not (self.is_local and os.path.isdir(self.root)):
            raise UserError(f"--data.root {self.root!a} is one tar file: give its folder")
        parts: dict[str, list[str]] = {}
        for name, is_folder in self.list_names():
            word = re.match("[a-z]*", name.lower())[0]
            part = part_of(name if is_folder else word)
            found = [] if is_folder else [name]
            if is_folder and part:
                found = [f"{name}/{shard}" for shard, _ in self.list_names(name)]
            if packed := [shard for shard in found if PACKED.sub(".tar", shard) not in found]:
                raise UserError(f"{self.show(packed[0])} is compressed: unpack it to a .tar")
            if shards := [shard for shard in found if shard.endswith(".tar")]:
                parts.setdefault(word if part == "val" else part, []).extend(sorted(shards))
        others = parts.pop("", [])
        if not parts:  # the word may stand elsewhere: `imagenet-train-000000.tar`
            for shard in others:
                role, _ = role_of(shard)
                parts.setdefault("" if role == "pred" else role, []).append(shard)
            others = parts.pop("", [])
        if not parts and not others:
            raise UserError(f"--data.root {self.root!a}: there are no tar files, train-000000.tar")
        if parts and others:
            raise UserError(f"{self.root!a}: is {others[0]!a} of train, val or test?")
        return parts or {"train": others}

    def list_names(self, folder: str = "") -> list[tuple[str, bool]]:
        """Names in a folder, sorted, and whether each is a folder.

        Raises:
            UserError: if there is no such folder, or its server does not list it.
        """
        here = self.here()
        try:
            entries = here.attempt(folder, lambda: here.fs.ls(self.place(folder), detail=True))
        except (OSError, ValueError) as error:
            raise UserError(f"cannot list {self.root!a}: {error}") from error
        found = {entry["name"].rstrip("/"): entry["type"] == "directory" for entry in entries}
        if self.is_local:  # where a folder may be a link, which is of another type
            found = {name: os.path.isdir(name) for name in found}
        return sorted((name.rpartition("/")[2], is_folder) for name, is_folder in found.items())

    def place(self, name: str) -> str:
        """Where a file is, for fsspec."""
        return f"{self.here().path}/{name}".rstrip("/")

    def describe(self, name: str) -> tuple[int, str]:
        """Size in bytes of a file, and what is another text once it has changed."""
        info = self.opened(name, lambda: self.here().fs.info(self.place(name)))
        if info["size"] is None:
            raise UserError(f"{self.show(name)}: its server does not tell its size")
        found = info["size"], {key: str(info[key]) for key in STAMPS if info.get(key)}
        if self.described.setdefault(name, found) != found:
            raise self.changed(name)
        return found[0], " ".join(found[1].values())

    def changed(self, name: str, what: str = "has changed") -> FaultError:
        """The error for a file that is not what it was."""
        return FaultError(
            f"{self.show(name)} {what} since this run began to read it: put the old file back, "
            "and run the same command to resume"
        )

    def read_lines(self, name: str) -> tuple[str, ...] | None:
        """The lines of a text file, without blank ones at its end; None if there is no file."""
        try:
            content = self.attempt(name, lambda: self.here().fs.cat_file(self.place(name)))
            lines = content.decode("utf-8-sig").rstrip("\r\n").splitlines()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read {self.show(name)}: {error}") from error
        if "" in map(str.strip, lines):
            raise UserError(f"{self.show(name)} has a blank line before others: remove it")
        return tuple(lines)

    def read(self, name: str, start: int, size: int) -> bytes:
        """Part of a file.

        Raises:
            FaultError: if it has changed or is gone since it was described, or can't be read from
                elsewhere after several attempts.
        """
        try:
            if not self.is_local:
                return self.attempt(name, lambda: self.fetch(name, start, size))
            file, state = self.files.get(name) or self.open(name)
            content = read_at(file, start, size)
        except FileNotFoundError as error:
            raise self.changed(name, "is gone") from error
        if state_of(file) != state or len(content) < size:
            raise self.changed(name)
        return content

    def open(self, name: str) -> tuple[BinaryIO, tuple[int, int]]:
        """A file of this machine and its state, if it is still as it was described; kept open."""
        if len(self.files) >= MOST_OPEN:  # a thread that reads from it has it a bit longer
            self.files.pop(next(iter(self.files)), None)
        file = open_plain(os.path.join(self.root, name))
        try:
            state = state_of(file)
            self.describe(name)  # after the state: what changes in between is seen
        except BaseException:
            file.close()
            raise
        return self.files.setdefault(name, (file, state))

    def fetch(self, name: str, start: int, size: int) -> bytes:
        """Part of a file elsewhere, by one request."""
        if not size:
            return b""
        place = self.place(name)
        if hasattr(self.fs, "encode_url"):  # fsspec's HTTP
            from fsspec.asyn import sync

            content = sync(self.fs.loop, self.fetch_range, name, place, start, start + size)
        else:
            content = self.fs.cat_file(place, start=start, end=start + size)
            if time.monotonic() > self.checked.get(name, 0.0) + RECHECK_SECONDS:
                self.fs.invalidate_cache(place)
                self.describe(name)
                self.checked[name] = time.monotonic()
        if len(content) != size:
            what = "its server sends whole files" if len(content) > size else "it ends too early"
            raise OSError(f"{len(content):,} bytes came, {size:,} were asked for: {what}")
        return content

    async def fetch_range(self, name: str, url: str, start: int, stop: int) -> bytes:
        """Part of a file of an HTTP server, whose answer tells the file's size and stamps."""
        wanted = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        headers = self.fs.kwargs.get("headers", {}) | wanted
        session = await self.fs.set_session()
        url = self.fs.encode_url(url)
        async with session.get(url, **self.fs.kwargs | {"headers": headers}) as answer:
            if answer.status in GONE:
                raise self.changed(name, "is gone or shorter")
            answer.raise_for_status()
            size, stamps = self.described[name]
            found = {key: answer.headers.get(key, was) for key, was in stamps.items()}
            total = answer.headers.get("Content-Range", "*").rpartition("/")[2]
            if found != stamps or total not in (str(size), "*"):
                raise self.changed(name)
            return await answer.read()

    def opened(self, name: str, act: Callable[[], T]) -> T:
        """What `act` returns, as `attempt`; `UserError` if a file is gone or may not be read."""
        try:
            return self.attempt(name, act)
        except OSError as error:
            raise UserError(f"cannot read {self.show(name)}: {error}") from error

    def attempt(self, name: str, act: Callable[[], T]) -> T:
        """What `act` returns; elsewhere, it is tried several times.

        Raises:
            FaultError: if it failed each time.
        """
        waits = () if self.has_given_up else WAITS  # else what is asked for would delay the end
        for wait in (*waits, None):
            try:
                return act()
            except (UserError, FaultError, FileNotFoundError, PermissionError, IsADirectoryError):
                raise
            except Exception as error:  # libraries raise any kind
                if self.is_local:
                    raise
                if wait is None:
                    self.has_given_up = True
                    reason = " ".join(str(error).split()) or type(error).__name__
                    raise FaultError(
                        f"cannot read {self.show(name)}: {reason}; tried {len(waits) + 1} times in "
                        f"{sum(waits):g} s; run the same command to resume"
                    ) from error
                time.sleep(wait)
        raise AssertionError

    def show(self, name: str) -> str:
        """A file in a message."""
        return ascii("/".join(filter(None, (self.root.rstrip("/"), name))))


def read_at(file: BinaryIO, start: int, size: int) -> bytes:
    """Part of an open file; processes and threads that share it do not disturb each other."""
    if hasattr(os, "pread"):
        return os.pread(file.fileno(), size, start)
    with LOCK:  # Windows, where processes share no files
        file.seek(start)
        return file.read(size)


def state_of(file: BinaryIO) -> tuple[int, int]:
    """Size in bytes and time of change in ns of an open file."""
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns
