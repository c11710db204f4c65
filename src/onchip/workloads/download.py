"""Download data sets from their publishers; files are verified by checksum and appear atomically.

Partial data is kept in NAME.part next to the file, and an interrupted download resumes from it.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
import queue
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from onchip.cache import cache_dir
from onchip.errors import FormatError, InputError, OnchipError
from onchip.files import open_input, open_locked, write_error

_CHUNK_BYTES = 1 << 16
_MAX_QUEUED_CHUNKS = 16  # queued for writing
TIMEOUT_S = 30.0  # without any byte; also a base for the total time limit
MIN_BYTES_S = 10_000  # slower sources are abandoned; received bytes are kept for the next attempt


@dataclass(frozen=True)
class DataFile:
    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class DataSet:
    """Files stored together in a folder of this name, and their sources."""

    name: str
    files: tuple[DataFile, ...]
    sources: tuple[str, ...]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


# LeCun, Cortes, Burges; checksums of the four files as published.
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

Progress = Callable[[int], None]  # called with the bytes present so far, over all files


def data_folder() -> Path:
    """The folder where data sets are stored and searched first: $ONCHIP_DATA, else `data` in the cache folder."""
    return Path(os.environ.get("ONCHIP_DATA") or cache_dir() / "data").absolute()


def fetch(data: DataSet, folder: Path, sources: Sequence[str] = (), progress: Progress = lambda done: None) -> int:
    """Download the files of a data set into a folder; return how many were missing.

    sources  URLs or folders with the files, tried in this order for each; default: the published ones
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


def _add(progress: Progress, before: int, position: int) -> None:
    progress(before + position)


def _fetch_file(file: DataFile, folder: Path, sources: Sequence[str], progress: Progress) -> None:
    refusals: list[str] = []
    for source in sources:
        try:
            _fetch_from(source, file, folder, progress)
            return
        except _SourceError as refused:
            refusals.append(f"{source}: {refused}")
    raise FormatError(
        f"{file.name} could not be downloaded", got="; ".join(refusals),
        expected=f"{file.size_bytes:,} B with its checksum",
        hint="repeat the command to resume; --from URL or FOLDER for another source",
    )  # fmt: skip


class _SourceError(Exception):
    """This source cannot provide the file now; another may."""


def _fetch_from(source: str, file: DataFile, folder: Path, progress: Progress) -> None:
    part = folder / f"{file.name}.part"
    try:
        locked = open_locked(part)
        if locked is None:
            got, hint = f"{part} is being written", "wait until the other onchip data has ended"
            raise InputError("another process downloads this file", got=got, expected="one at a time", hint=hint)
        with io.BufferedRandom(locked) as out:
            _append(source, file, out, progress)
            out.seek(0)
            if hashlib.file_digest(out, "sha256").hexdigest() != file.sha256:
                part.unlink()  # resuming after wrong bytes cannot succeed
                raise _SourceError("the checksum differs from the published one")
            os.replace(part, folder / file.name)  # before closing, which releases the lock
    except (OnchipError, _SourceError):
        raise
    except OSError as error:
        raise write_error(part, error) from None


def _append(source: str, file: DataFile, out: IO[bytes], progress: Progress) -> None:
    """Append the missing bytes."""
    present = out.seek(0, os.SEEK_END)
    if present == file.size_bytes:
        return
    end_s = time.monotonic() + TIMEOUT_S + file.size_bytes / MIN_BYTES_S
    position = -1
    for chunk in _chunks(source, file, present if present < file.size_bytes else 0, end_s):
        if isinstance(chunk, int):  # a server without range support starts over
            position = out.seek(chunk)
            out.truncate()
        else:
            position += out.write(chunk)
            progress(position)
    if position < file.size_bytes:
        raise _SourceError(f"it ends after {position:,} B")


def _chunks(source: str, file: DataFile, begin: int, end_s: float) -> Iterator[int | bytes]:
    """Yield the source's start offset, then its chunks up to the file size; _SourceError on failure or timeout.

    A separate thread reads: a server that keeps sending a few bytes could block the caller forever.
    """
    received: queue.Queue[int | bytes | Exception] = queue.Queue(_MAX_QUEUED_CHUNKS)
    is_over = threading.Event()

    def read() -> None:
        try:
            with _opened(source, file.name, begin) as (incoming, begins):
                received.put(begins)  # the first item: the queue has space
                left = file.size_bytes - begins
                while not is_over.is_set() and left and (chunk := incoming.read1(min(_CHUNK_BYTES, left))):
                    received.put(chunk, timeout=TIMEOUT_S)
                    left -= len(chunk)
            received.put(b"", timeout=TIMEOUT_S)
        except Exception as error:  # servers and addresses cause HTTPException, ValueError, UnicodeError, OSError, ..
            with suppress(queue.Full):
                received.put(error, timeout=TIMEOUT_S)

    threading.Thread(target=read, name="onchip-fetch", daemon=True).start()
    position = 0
    try:
        while True:
            try:
                chunk = received.get(timeout=max(0.0, end_s - time.monotonic()))
            except queue.Empty:
                raise _SourceError(f"it is too slow: {position:,} B before the time limit") from None
            if isinstance(chunk, Exception):
                reasons = (getattr(chunk, name, None) for name in ("got", "reason", "strerror"))
                reason = next(filter(None, reasons), None) or str(chunk) or type(chunk).__name__
                raise _SourceError(f"{reason}" + (f" after {position:,} B" if position else ""))
            if chunk == b"":
                return
            position = chunk if isinstance(chunk, int) else position + len(chunk)
            yield chunk
    finally:
        is_over.set()


@contextmanager
def _opened(source: str, name: str, begin: int) -> Iterator[tuple[Any, int]]:
    """Open a file of a source; also return its start offset, `begin` if the source supports it."""
    if source.startswith(("http://", "https://")):
        request = urllib.request.Request(f"{source.rstrip('/')}/{name}", headers={"Range": f"bytes={begin}-"})
        with urllib.request.urlopen(request if begin else request.full_url, timeout=TIMEOUT_S) as incoming:
            yield incoming, begin if incoming.status == 206 else 0
    else:
        with open_input(Path(source.removeprefix("file://")) / name) as stored:
            stored.seek(begin)
            yield stored, begin


def _is_whole(path: Path, file: DataFile) -> bool:
    try:
        return path.stat().st_size == file.size_bytes and _digest(path) == file.sha256
    except OSError:
        return False


def _digest(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
