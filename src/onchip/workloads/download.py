"""Data sets fetched from where they are published: each file whole and by its checksum, or not at all.

What has arrived lies in NAME.part beside the file, and a fetch that was cut short goes on behind it.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from onchip.cache import cache_dir
from onchip.errors import FormatError, InputError, OnchipError
from onchip.files import open_locked, write_error

_PIECE_BYTES = 1 << 16
_TIMEOUT_S = 30.0  # without a byte


@dataclass(frozen=True)
class DataFile:
    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class DataSet:
    """Files that lie side by side, in a folder of this name, and where they are published."""

    name: str
    files: tuple[DataFile, ...]
    sources: tuple[str, ...]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


# LeCun, Cortes, Burges; the checksums are those of the four files as they were published.
_MNIST_FILES = (
    ("train-images-idx3-ubyte.gz", 9_912_422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
    ("train-labels-idx1-ubyte.gz", 28_881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
    ("t10k-images-idx3-ubyte.gz", 1_648_877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
    ("t10k-labels-idx1-ubyte.gz", 4_542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
)
_MNIST_SOURCES = (
    "https://ossci-datasets.s3.amazonaws.com/mnist", "https://storage.googleapis.com/cvdf-datasets/mnist",
)  # fmt: skip
MNIST = DataSet("mnist", tuple(DataFile(*file) for file in _MNIST_FILES), _MNIST_SOURCES)
DATA_SETS = {MNIST.name: MNIST}

Progress = Callable[[int], None]  # of the bytes that are there, of all files


def data_folder() -> Path:
    """Where data sets are looked for first, and put: $ONCHIP_DATA, else `data` in the cache folder."""
    return Path(os.environ.get("ONCHIP_DATA") or cache_dir() / "data").absolute()


def fetch(data: DataSet, folder: Path, sources: Sequence[str] = (), progress: Progress = lambda done: None) -> int:
    """Put the files of a data set into a folder; how many of them were not there yet.

    sources  URLs or folders that hold the files, tried in this order for each; else where they are published
    """
    fetched = done = 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(folder, error) from None
    for file in data.files:
        if not _is_whole(folder / file.name, file):
            _fetch_file(file, folder, sources or data.sources, functools.partial(_add, progress, done))
            fetched += 1
        done += file.size_bytes
        progress(done)
    return fetched


def _add(progress: Progress, before: int, here: int) -> None:
    progress(before + here)


def _fetch_file(file: DataFile, folder: Path, sources: Sequence[str], progress: Progress) -> None:
    refusals: list[str] = []
    for source in sources:
        try:
            _fetch_from(source, file, folder, progress)
            return
        except _SourceError as refused:
            refusals.append(f"{source}: {refused}")
    raise FormatError(
        f"{file.name} could not be fetched", got="; ".join(refusals),
        expected=f"{file.size_bytes:,} B with its checksum",
        hint="the same command again goes on where it stopped; --from URL or FOLDER names another place",
    )  # fmt: skip


class _SourceError(Exception):
    """This place does not have the file, or not now; another may."""


def _fetch_from(source: str, file: DataFile, folder: Path, progress: Progress) -> None:
    part = folder / f"{file.name}.part"
    try:
        locked = open_locked(part)
        if locked is None:
            got, hint = f"{part} is being written", "wait until the other onchip data has ended"
            raise InputError("another process fetches this file", got=got, expected="one at a time", hint=hint)
        with io.BufferedRandom(locked) as out:
            _append(source, file, out, progress)
            out.seek(0)
            if hashlib.file_digest(out, "sha256").hexdigest() != file.sha256:
                part.unlink()  # to continue after wrong bytes would not make them right
                raise _SourceError("the bytes are not those that were published")
            os.replace(part, folder / file.name)  # before it is closed, which ends its lock
    except (OnchipError, _SourceError):
        raise
    except OSError as error:
        raise write_error(part, error) from None


def _append(source: str, file: DataFile, out: IO[bytes], progress: Progress) -> None:
    """Write what is missing behind what is there."""
    there = out.seek(0, os.SEEK_END)
    with _opened(source, file.name, there if there <= file.size_bytes else 0) as (incoming, begins):
        out.truncate(begins)  # a server that cannot begin in the middle begins anew
        out.seek(begins)
        here = begins
        while here < file.size_bytes:
            try:
                piece = incoming.read(min(_PIECE_BYTES, file.size_bytes - here))
            except OSError as error:
                raise _SourceError(f"it broke off after {here:,} B ({error})") from None
            if not piece:
                raise _SourceError(f"it ends after {here:,} B")
            out.write(piece)
            here += len(piece)
            progress(here)


@contextmanager
def _opened(source: str, name: str, begin: int) -> Iterator[tuple[IO[bytes], int]]:
    """A file of a source, and the byte that its first is: `begin` where the source can."""
    is_url = source.startswith(("http://", "https://"))
    try:
        if is_url:
            request = urllib.request.Request(f"{source.rstrip('/')}/{name}", headers={"Range": f"bytes={begin}-"})
            incoming = urllib.request.urlopen(request if begin else request.full_url, timeout=_TIMEOUT_S)
            begins = begin if incoming.status == 206 else 0
        else:
            incoming, begins = (Path(source.removeprefix("file://")) / name).open("rb"), begin
            incoming.seek(begin)
    except OSError as error:  # urllib's are
        reason = getattr(error, "reason", None) or error.strerror or error
        raise _SourceError(f"{reason}") from None
    with incoming:
        yield incoming, begins


def _is_whole(path: Path, file: DataFile) -> bool:
    try:
        return path.stat().st_size == file.size_bytes and _digest(path) == file.sha256
    except OSError:
        return False


def _digest(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
