"""The rows of an unfinished output file; several processes each write slices of it."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from onchip.errors import OutputError
from onchip.files import open_owned, write_error
from onchip.formats.graph_json import parse_json
from onchip.network.recipe import Array
from onchip.network.types import numpy_dtype

_CHUNK_BYTES, _MAX_THREADS = 2 << 20, 8  # of a digest: threads share longer data


@dataclass(frozen=True)
class Slices:
    """The location of an unfinished output's rows: plain data, by which any process finds and fills them."""

    path: str
    offset: int  # bytes before the first row
    shape: tuple[int, ...]  # (rows, ...)
    dtype: str
    token: str = ""  # also in the manifest's first line: tells it from a file of the same name on another machine

    @property
    def row_bytes(self) -> int:
        return int(np.prod(self.shape[1:], dtype=np.int64)) * self.stored.itemsize

    @property
    def stored(self) -> np.dtype[Any]:
        return numpy_dtype(self.dtype).newbyteorder("<")


class SliceFile:
    """Rows of an unfinished output, written and read by index."""

    def __init__(self, slices: Slices) -> None:
        self.slices = slices
        self._file = open_owned(Path(slices.path), create=False)

    def write(self, start: int, rows: Array) -> str:
        """Write rows (any, ...) from row `start` on; returns their digest."""
        data = memoryview(np.asarray(rows, self.slices.stored, order="C").reshape(-1).view(np.uint8).data)
        digest = begin_digest(data)
        try:
            self._file.seek(self.slices.offset + start * self.slices.row_bytes)
            while len(data):
                data = data[self._file.write(data) :]
        except OSError as error:
            raise write_error(Path(self.slices.path), error) from None
        return digest()

    def write_head(self, head: bytes) -> None:
        """Write the header before the rows, and truncate the file after them."""
        end = len(head) + self.slices.shape[0] * self.slices.row_bytes
        try:
            self._file.seek(0)
            self._file.write(head)
            if os.fstat(self._file.fileno()).st_size > end:
                self._file.truncate(end)
        except OSError as error:
            raise write_error(Path(self.slices.path), error) from None

    def read_bytes(self, start: int, stop: int) -> bytes:
        self._file.seek(self.slices.offset + start * self.slices.row_bytes)
        wanted, data = (stop - start) * self.slices.row_bytes, bytearray()
        while len(data) < wanted and (data_read := self._file.read(wanted - len(data))):
            data += data_read
        return bytes(data)

    def read(self, start: int, stop: int) -> Array:
        """Rows start .. stop - 1, (stop - start, ...)."""
        rows = np.frombuffer(self.read_bytes(start, stop), self.slices.stored)
        return rows.reshape(stop - start, *self.slices.shape[1:]).astype(numpy_dtype(self.slices.dtype))

    def sync(self) -> None:
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise write_error(Path(self.slices.path), error) from None

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def has_token(slices: Slices) -> bool:
    """Whether this process sees the same output file, by the token in its manifest."""
    try:
        file = open_owned(Path(slices.path.removesuffix(".partial") + ".manifest"), create=False)
        with io.BufferedReader(file) as manifest:
            return parse_line(manifest.readline().removesuffix(b"\n")).get("token") == slices.token
    except (OSError, OutputError):
        return False


# -- lines of a manifest: a digest and its JSON -------------------------------------------------------------------


def make_line(entry: Mapping[str, Any]) -> bytes:
    text = json.dumps(entry).encode()
    return hashlib.sha256(text).hexdigest().encode() + b" " + text + b"\n"


def parse_line(line: bytes) -> dict[str, Any]:
    """The contents of a line without its newline; empty if its digest does not match."""
    digest, _, text = line.partition(b" ")
    if digest != hashlib.sha256(text).hexdigest().encode():
        return {}
    try:
        entry = parse_json(text.decode(), "a line")
    except ValueError:  # or FormatError: onchip did not write this line
        return {}
    return entry if isinstance(entry, dict) else {}


def digest_rows(data: bytes | memoryview) -> str:
    """The digest of rows as stored in the file."""
    return begin_digest(data)()


def begin_digest(data: bytes | memoryview) -> Callable[[], str]:
    """digest_rows, computed by threads in the background; call the returned function for the digest.

    BLAKE2b of the digests of 2 MiB chunks. It is as strong as SHA-256, and faster on CPUs without SHA instructions.
    """
    view = memoryview(data)
    chunks = [view[start : start + _CHUNK_BYTES] for start in range(0, len(view), _CHUNK_BYTES)]
    if len(chunks) < 2:
        return lambda: _blake(b"".join(map(_blake, chunks))).hex()
    pool = ThreadPoolExecutor(min(len(chunks), _MAX_THREADS, os.cpu_count() or 1))
    found = [pool.submit(_blake, chunk) for chunk in chunks]
    pool.shutdown(wait=False)
    return lambda: _blake(b"".join(each.result() for each in found)).hex()


def _blake(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()
