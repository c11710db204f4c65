"""Rows of an unfinished output, where several processes write them: each its own slices."""

from __future__ import annotations

import io
import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from onchip.errors import OutputError
from onchip.files import open_own, write_error
from onchip.spec.recipe import Array
from onchip.spec.types import numpy_dtype


@dataclass(frozen=True)
class Slices:
    """Where the rows of an unfinished output lie: plain data, by which any process finds and fills them."""

    path: str
    offset: int  # bytes in front of the first row
    shape: tuple[int, ...]  # (rows, ...)
    dtype: str
    token: str = ""  # stands in the manifest's first line: a file of the same name on another machine has another

    @property
    def row_bytes(self) -> int:
        return int(np.prod(self.shape[1:], dtype=np.int64)) * self.stored.itemsize

    @property
    def stored(self) -> np.dtype[Any]:
        return numpy_dtype(self.dtype).newbyteorder("<")


class SliceFile:
    """Rows of an unfinished output, written and read by their numbers."""

    def __init__(self, slices: Slices) -> None:
        self.slices = slices
        self._file = open_own(Path(slices.path), create=False)

    def write(self, start: int, rows: Array) -> int:
        """Put rows (any, ...) where row `start` lies; gives their checksum."""
        data = memoryview(np.asarray(rows, self.slices.stored, order="C").reshape(-1).view(np.uint8).data)
        crc = zlib.crc32(data)
        try:
            self._file.seek(self.slices.offset + start * self.slices.row_bytes)
            while len(data):
                data = data[self._file.write(data) :]
        except OSError as error:
            raise write_error(Path(self.slices.path), error) from None
        return crc

    def read_bytes(self, start: int, stop: int) -> bytes:
        self._file.seek(self.slices.offset + start * self.slices.row_bytes)
        wanted, data = (stop - start) * self.slices.row_bytes, bytearray()
        while len(data) < wanted and (piece := self._file.read(wanted - len(data))):
            data += piece
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
    """Whether this process sees the very output that these slices are of."""
    try:
        file = open_own(Path(slices.path.removesuffix(".partial") + ".manifest"), create=False)
        with io.BufferedReader(file) as manifest:
            return parse_line(manifest.readline()).get("token") == slices.token
    except (OSError, OutputError):
        return False


def parse_line(line: bytes) -> dict[str, Any]:
    """A line of a manifest; an incomplete one is empty."""
    try:
        told = json.loads(line)
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}
