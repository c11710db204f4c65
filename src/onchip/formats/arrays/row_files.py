"""Arrays of rows on disk, opened without being loaded, and written in chunks.

open_rows detects .npy and idx (the format of MNIST), which it reads on demand, and gzipped idx, which it unpacks into
memory. The first bytes determine the format. open_flat_rows opens headerless files of a given shape and dtype.
"""

from __future__ import annotations

import abc
import ast
import contextlib
import gzip
import io
import math
import mmap
import os
import pickle
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, cast

import numpy as np

from onchip.errors import FormatError, InputError, ShapeError
from onchip.files import atomic_write, free_memory, open_input
from onchip.network.reading import MAX_DIM, MAX_RANK, naming_file, show
from onchip.network.recipe import Array

MAX_NPY_HEADER_BYTES = 1 << 16
MAX_UNPACKED_BYTES = 1 << 30  # of a .gz, which has no random access
_DEFLATE_RATIO = 1032  # the maximum compression ratio of gzip

_DTYPES = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
            "float16", "float32", "float64")  # fmt: skip
_IDX_DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_NPY_MAGIC, _GZIP_MAGIC, _IDX_MAGIC = b"\x93NUMPY", b"\x1f\x8b", b"\0\0"


@dataclass(frozen=True)
class _Layout:
    """Position of rows in a file, and what identifies the file for another process."""

    path: str
    file_bytes: int
    changed_ns: int
    offset: int
    dtype: str
    shape: tuple[int, ...]
    order: str


class _StoredRows:
    """Rows in a file, sliced like an array.

    Read, not mapped: if the file is truncated meanwhile, a process that maps it is killed by SIGBUS.
    """

    def __init__(self, file: IO[bytes], layout: _Layout) -> None:
        self._file, self._layout = io.FileIO(os.dup(file.fileno())), layout
        self.shape, self.dtype = layout.shape, np.dtype(layout.dtype)

    def __getitem__(self, rows_slice: slice) -> Array:
        rows, *row_shape = self.shape
        start, stop, _ = rows_slice.indices(rows)
        if self._layout.order == "C" or stop == start:
            result = np.empty((stop - start, *row_shape), self.dtype)
            self._fill(result, start * result[:1].nbytes)
            return result
        # Column-major: the elements of each column are contiguous.
        transposed = np.empty((*reversed(row_shape), stop - start), self.dtype)
        for i, column in enumerate(transposed.reshape(-1, stop - start)):
            self._fill(column, (i * rows + start) * self.dtype.itemsize)
        return transposed.T

    def _fill(self, array: Array, begin: int) -> None:
        """Read into `array` from `begin` bytes after the header."""
        remaining = memoryview(array.reshape(-1).view(np.uint8).data)
        position = self._layout.offset + begin
        with naming_file(Path(self._layout.path)):
            while len(remaining):
                if not (count := os.preadv(self._file.fileno(), [remaining], position)):  # thread-safe
                    got, expected = f"{position:,} B", f"{self._layout.file_bytes:,} B, as when it was opened"
                    hint = "run the command again when the file is complete"
                    raise FormatError("the file was truncated while it was read", got=got, expected=expected, hint=hint)
                remaining, position = remaining[count:], position + count

    def close(self) -> None:
        self._file.close()

    __del__ = close  # copies in other processes or threads are dropped without close()


class RowSource:
    """Rows of a file, read on demand. Close it, or use it in a `with` block.

    layout  position of the rows, used to reopen the file in another process after pickling; None: in memory
    """

    def __init__(self, rows: Array | _StoredRows, close: Callable[[], None], layout: _Layout | None = None) -> None:
        self._layout = layout
        self.shape: tuple[int, ...] = rows.shape
        self.dtype: np.dtype[Any] = rows.dtype.newbyteorder("=")  # what read() returns
        self._rows: Array | _StoredRows | None = rows
        self._close = close

    def __len__(self) -> int:
        return self.shape[0]

    def read(self, start: int, stop: int) -> Array:
        """A copy of rows start .. stop - 1, row-major, native byte order; clipped at the end, like a slice."""
        if self._rows is None:
            raise InputError("the rows are closed", hint="read inside the `with` block")
        if not 0 <= start <= stop:
            raise InputError("bad row range", got=f"{start} to {stop}", expected=f"0 <= start <= stop <= {len(self)}")
        is_stored = isinstance(self._rows, _StoredRows)  # already a copy
        return np.array(self._rows[start:stop], dtype=self.dtype, order="C", copy=None if is_stored else True)

    def close(self) -> None:
        if self._rows is not None:
            self._rows = None
            self._close()

    def __reduce__(self) -> tuple[object, ...]:
        if self._layout is None:
            raise pickle.PicklingError("rows in memory cannot be pickled")
        return _open_again, (self._layout,)

    def __enter__(self) -> RowSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_rows(path: str | os.PathLike[str]) -> RowSource:
    """Open an .npy, idx or gzipped idx file of shape (rows, ...) and any numeric dtype."""
    source = Path(path)
    with open_input(source) as file, naming_file(source):
        magic = file.read(len(_NPY_MAGIC))
        file.seek(0)
        if magic == _NPY_MAGIC:
            return _open_npy(file)
        if magic.startswith(_GZIP_MAGIC):
            return _open_gzip(file)
        if magic.startswith(_IDX_MAGIC):
            return _open_idx(file)
        raise FormatError(
            "not an array of rows", got=f"a file that begins with {magic.hex(' ')}" if magic else "0 B",
            expected=".npy (begins with 93 4e 55 4d 50 59), idx (00 00) or idx in .gz (1f 8b)",
            hint="numpy.save('rows.npy', rows)",
        )  # fmt: skip


def map_npy(path: str | os.PathLike[str]) -> Array:
    """The rows of an .npy file, memory-mapped copy-on-write."""
    source = Path(path)
    with open_input(source) as file, naming_file(source):
        if file.read(len(_NPY_MAGIC)) != _NPY_MAGIC:
            raise FormatError("not an .npy file", got="other first bytes", expected="93 4e 55 4d 50 59")
        file.seek(0)
        dtype, shape, order, offset = _npy_layout(file)
        _check_size(offset, dtype, shape, os.fstat(file.fileno()).st_size)
        return _as_rows(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), offset, dtype, shape, order)


def open_flat_rows(path: str | os.PathLike[str], row_shape: tuple[int, ...], dtype: np.dtype[Any]) -> RowSource:
    """Open a headerless file of rows of this shape and dtype, little-endian."""
    source = Path(path)
    stored = dtype.newbyteorder("<")
    row_bytes = _data_bytes(stored, row_shape)
    with open_input(source) as file, naming_file(source):
        file_bytes = os.fstat(file.fileno()).st_size
        rows, extra = divmod(file_bytes, row_bytes) if row_bytes else (0, file_bytes)
        if extra or not rows:
            what = f"the last row, at byte {file_bytes - extra:,}, is incomplete" if rows else "less than one row"
            raise FormatError(
                what, got=f"{file_bytes:,} B",
                expected=f"a multiple of {row_bytes:,} B: rows of {dtype.name} {show(row_shape)}",
                hint="copy the file again, or check that it was written for this network",
            )  # fmt: skip
        return _stored_rows(file, 0, stored, (rows, *row_shape), "C")


# -- npy ---------------------------------------------------------------------------------------------------


def _open_npy(file: IO[bytes]) -> RowSource:
    dtype, shape, order, offset = _npy_layout(file)
    return _stored_rows(file, offset, dtype, shape, order)


def rows_of_npy(data: bytes) -> Array:
    """The rows of an .npy file in memory."""
    with io.BytesIO(data) as file:
        if file.read(len(_NPY_MAGIC)) != _NPY_MAGIC:
            raise FormatError("not an .npy file", got="other first bytes", expected="93 4e 55 4d 50 59")
        file.seek(0)
        dtype, shape, order, offset = _npy_layout(file)
    _check_size(offset, dtype, shape, len(data))
    return _as_rows(data, offset, dtype, shape, order)


def _npy_layout(file: IO[bytes]) -> tuple[np.dtype[Any], tuple[int, ...], str, int]:
    """Dtype, shape, order and data offset."""
    major = file.read(8)[6:7]
    if major not in (b"\1", b"\2", b"\3"):
        raise FormatError("unknown version of .npy", got=f"version {major.hex() or 'missing'}", expected="1, 2 or 3")
    width = 2 if major == b"\1" else 4
    size = file.read(width)
    length = int.from_bytes(size, "little")
    if length > MAX_NPY_HEADER_BYTES:
        raise FormatError(
            "the .npy header is too long", got=f"{length:,} B", expected=f"at most {MAX_NPY_HEADER_BYTES:,} B"
        )
    text = file.read(length)
    if len(size) < width or len(text) < length:
        raise FormatError("the file ends inside its header", got=f"{len(text)} B", expected=f"{length} B of header")
    dtype, shape, fortran = _npy_header(text, "utf-8" if major == b"\3" else "latin-1")
    return dtype, shape, "F" if fortran else "C", 8 + width + length


def _npy_header(text: bytes, encoding: str) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    try:
        if b"\\" in text:
            raise ValueError("a backslash")
        header = ast.literal_eval(text.decode(encoding).strip())
        descr, fortran, shape = header["descr"], header["fortran_order"], header["shape"]
    except (ValueError, SyntaxError, TypeError, KeyError, RecursionError, MemoryError):
        expected = "{'descr': ..., 'fortran_order': ..., 'shape': ...}"
        raise FormatError("the .npy header is malformed", got=show(text), expected=expected) from None
    if not isinstance(fortran, bool):
        raise FormatError("bad fortran_order in the .npy header", got=show(fortran), expected="True or False")
    if not isinstance(shape, tuple) or any(type(d) is not int or not 0 <= d <= MAX_DIM for d in shape):
        raise FormatError("bad shape in the .npy header", got=show(shape), expected="a tuple of sizes")
    return _parse_dtype(descr), _check_rank(shape), fortran


def _parse_dtype(descr: object) -> np.dtype[Any]:
    try:
        dtype = np.dtype(descr) if isinstance(descr, str) and len(descr) <= 4 else None
    except (TypeError, ValueError, SyntaxError):
        dtype = None
    if dtype is None or dtype.name not in _DTYPES:
        hint = "pickled Python objects can run code when they are loaded: save a numeric array" if descr == "|O" else ""
        raise FormatError("unsupported dtype of the rows", got=show(descr), expected=", ".join(_DTYPES), hint=hint)
    return dtype


# -- idx ---------------------------------------------------------------------------------------------------


def _open_idx(file: IO[bytes]) -> RowSource:
    dtype, shape, offset = _idx_header(file)
    return _stored_rows(file, offset, dtype, shape, "C")


def _idx_header(file: IO[bytes]) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    magic = file.read(4)
    if len(magic) < 4 or magic[:2] != _IDX_MAGIC or magic[2] not in _IDX_DTYPES:
        raise FormatError(
            "not an idx file", got=magic.hex(" ") or "0 B",
            expected=f"00 00, a dtype of {', '.join(f'{code:02x}' for code in _IDX_DTYPES)}, the number of axes",
        )  # fmt: skip
    rank = magic[3]
    sizes = file.read(4 * rank)
    if len(sizes) < 4 * rank:
        raise FormatError("the file ends inside its header", got=f"{4 + len(sizes)} B", expected=f"{4 + 4 * rank} B")
    shape = tuple(int.from_bytes(sizes[i : i + 4], "big") for i in range(0, 4 * rank, 4))
    return np.dtype(_IDX_DTYPES[magic[2]]), _check_rank(shape), 4 + 4 * rank


def _open_gzip(file: IO[bytes]) -> RowSource:
    packed_bytes = os.fstat(file.fileno()).st_size
    try:
        with gzip.GzipFile(fileobj=file, mode="rb") as unpacked:
            dtype, shape, offset = _idx_header(cast(IO[bytes], unpacked))
            needed = _data_bytes(dtype, shape)
            limit = min(MAX_UNPACKED_BYTES, _DEFLATE_RATIO * packed_bytes, free_memory() // 2)
            if needed > limit:
                raise FormatError(
                    "the header declares more data than this .gz can contain", got=f"{needed:,} B for {show(shape)}",
                    expected=f"at most {limit:,} B from {packed_bytes:,} B compressed",
                    hint="gunzip the file first: an uncompressed idx file is read in chunks",
                )  # fmt: skip
            data = bytearray()
            # Request one extra byte: it detects trailing data and makes gzip verify its checksum.
            while len(data) <= needed and (chunk := unpacked.read(min(1 << 20, needed + 1 - len(data)))):
                data += chunk
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        hint = "copy or download the file again"
        raise FormatError("the .gz is damaged", got=str(error), expected="a complete gzip file", hint=hint) from None
    _check_size(offset, dtype, shape, offset + len(data))
    return RowSource(_as_rows(data, 0, dtype, shape, "C"), lambda: None)


# -- shared ------------------------------------------------------------------------------------------------


def _check_rank(shape: tuple[int, ...]) -> tuple[int, ...]:
    if not 1 <= len(shape) <= MAX_RANK:
        raise FormatError("not an array of rows", got=f"shape {show(shape)}", expected=f"1 to {MAX_RANK} axes")
    return shape


def _data_bytes(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    return dtype.itemsize * math.prod(shape)


def _check_size(offset: int, dtype: np.dtype[Any], shape: tuple[int, ...], file_bytes: int) -> None:
    needed = offset + _data_bytes(dtype, shape)
    if file_bytes == needed:
        return
    what = "the file is truncated" if file_bytes < needed else "the file has extra bytes after its last row"
    got = f"{file_bytes:,} B" if file_bytes < needed else f"more than {needed:,} B"
    raise FormatError(
        what, got=got, expected=f"{offset} B of header + {needed - offset:,} B of {dtype.name} {show(shape)}",
        hint="copy or download the file again",
    )  # fmt: skip


def _stored_rows(file: IO[bytes], offset: int, dtype: np.dtype[Any], shape: tuple[int, ...], order: Any) -> RowSource:
    found = os.fstat(file.fileno())
    _check_size(offset, dtype, shape, found.st_size)
    path = os.path.abspath(file.name)
    layout = _Layout(path, found.st_size, found.st_mtime_ns, offset, dtype.str, shape, order)
    if 0 in shape:
        return RowSource(_as_rows(b"", offset, dtype, shape, order), lambda: None, layout)
    rows = _StoredRows(file, layout)
    return RowSource(rows, rows.close, layout)


def _open_again(layout: _Layout) -> RowSource:
    """Reopen the same rows in another process; FormatError if the file differs on this machine."""
    with open_input(layout.path) as file:
        found = os.fstat(file.fileno())
        if (found.st_size, found.st_mtime_ns) != (layout.file_bytes, layout.changed_ns):
            raise FormatError(f"{layout.path} changed since it was opened", expected=f"{layout.file_bytes:,} B")
        return _stored_rows(file, layout.offset, np.dtype(layout.dtype), layout.shape, layout.order)


def _as_rows(buffer: Any, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...], order: Any) -> Array:
    if 0 in shape:
        buffer, offset = bytearray(), 0
    try:
        return np.ndarray(shape, dtype, buffer=buffer, offset=offset, order=order)
    except ValueError as error:  # sizes whose product overflows next to a 0
        raise FormatError("bad shape in the header", got=f"{show(shape)}: {error}") from None


# -- writing -----------------------------------------------------------------------------------------------


class RowWriter(abc.ABC):
    """Writes rows of a known shape in chunks; the file appears atomically when all rows are written.

    with NpyWriter("out.npy", (B, 10), "float32") as out:
        out.write(rows)         # (n, 10) float32, any number of times
    """

    def __init__(self, path: str | os.PathLike[str], shape: tuple[int, ...], dtype: Any) -> None:
        self.path, self.shape = Path(path), tuple(int(d) for d in shape)
        self.dtype = np.dtype(dtype).newbyteorder("=")
        self.rows = 0  # written so far
        if not self.shape or min(self.shape) < 0:
            raise InputError(f"cannot write {self.path}", got=f"shape {self.shape}", expected="(rows, sizes...)")
        if self.dtype.name not in _DTYPES:
            hint = "rows in float32 or float16: --io fp32" if "float" in self.dtype.name else ""
            raise InputError(f"{self.path} cannot store {self.dtype.name}", expected=", ".join(_DTYPES), hint=hint)

    @abc.abstractmethod
    def _begin(self, file: IO[bytes]) -> None:
        """Write the header."""

    @abc.abstractmethod
    def _append(self, file: IO[bytes], rows: Array) -> None:
        """Write rows of the declared shape and dtype; self.rows precede them."""

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._file = stack.enter_context(atomic_write(self.path))
            stack.push(self._check_count)
            self._begin(self._file)
            self._stack = stack.pop_all()
        return self

    def write(self, rows: Array) -> None:
        """Append rows of the declared shape and dtype."""
        if rows.shape[1:] != self.shape[1:] or rows.ndim == 0 or rows.dtype.newbyteorder("=") != self.dtype:
            raise ShapeError(
                f"the rows do not match {self.path}", got=f"{rows.dtype.name} {rows.shape}",
                expected=f"{self.dtype.name} (any, {', '.join(map(str, self.shape[1:]))})",
            )  # fmt: skip
        if self.rows + len(rows) > self.shape[0]:
            raise self._count_error(self.rows + len(rows))
        self._append(self._file, rows)
        self.rows += len(rows)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._stack.__exit__(kind, error, trace)

    def _check_count(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self.rows != self.shape[0]:
            raise self._count_error(self.rows)

    def _count_error(self, rows: int) -> InputError:
        return InputError(f"wrong number of rows for {self.path}", got=f"{rows:,}", expected=f"{self.shape[0]:,}")


class FlatWriter(RowWriter):
    """Headerless data, little-endian: the format of open_flat_rows."""

    def _begin(self, file: IO[bytes]) -> None:
        pass

    def _append(self, file: IO[bytes], rows: Array) -> None:
        file.write(np.asarray(rows, self.dtype.newbyteorder("<"), order="C").reshape(-1).view(np.uint8).data)


class NpyWriter(FlatWriter):
    def _begin(self, file: IO[bytes]) -> None:
        file.write(npy_header(self.shape, self.dtype))


def npy_header(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    """The header of an .npy file, little-endian and row-major."""
    descr = np.lib.format.dtype_to_descr(dtype.newbyteorder("<"))
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": descr, "fortran_order": False, "shape": shape})
    return head.getvalue()
