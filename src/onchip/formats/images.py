"""Images as .bmp and .png: each row is an image; all rows are tiled into one picture.

N images form a square of ceil(sqrt N) by ceil(sqrt N) tiles in row-major order, or lines of so many `columns`; the rest
is black. One line of tiles is in memory at a time.
"""

from __future__ import annotations

import abc
import math
import os
import struct
import zlib
from typing import IO, Any

import numpy as np

from onchip.errors import InputError
from onchip.formats.arrays.row_files import RowWriter
from onchip.network.recipe import Array
from onchip.network.types import TensorType

SYNTHETIC = "synthetic: computed by a neural network (onchip)"  # in the metadata of .png and .gif
_BMP_HEADER_BYTES = 54
_MAX_BMP_BYTES = (1 << 32) - 1  # the header has a 32-bit size
_MAX_SIDE = (1 << 31) - 1  # sides are signed 32-bit in both headers


def is_image(row_type: TensorType) -> bool:
    """Whether a row can be drawn: (H, W), (H, W, 1) or (H, W, 3), bytes or floats in [-1, 1]."""
    shape = row_type.row_shape
    drawn = len(shape) == 2 or (len(shape) == 3 and shape[2] in (1, 3))
    return drawn and 0 not in shape and (row_type.dtype == "uint8" or "float" in row_type.dtype)


def to_pixels(x: Array) -> Array:
    """uint8((x + 1) / 2 * 255), clamped to 0..255 and truncated; NaN becomes 0. Bytes are unchanged."""
    if x.dtype == np.uint8:
        return x
    scaled = (x.astype(np.float32) + np.float32(1)) / np.float32(2) * np.float32(255)
    return np.where(np.isnan(scaled), np.float32(0), np.clip(scaled, 0, 255)).astype(np.uint8)


def check_images(writer: RowWriter) -> None:
    """InputError unless the rows of a writer are images, at least one."""
    path, shape, dtype = writer.path, writer.shape, writer.dtype.name
    if not is_image(TensorType(("B", *shape[1:]), dtype)):
        raise InputError(
            f"cannot write {path}: the rows are not images", got=f"{dtype} {list(shape)}",
            expected="rows (H, W, 3), (H, W, 1) or (H, W), float or uint8", hint=f"-o {path.with_suffix('.npy')}",
        )  # fmt: skip
    if shape[0] == 0:
        hint = f"-o {path.with_suffix('.npy')} can be empty"
        raise InputError(f"cannot write {path}: no images", got="0 rows", expected="at least 1 row", hint=hint)


class _TileWriter(RowWriter):
    def __init__(
        self, path: str | os.PathLike[str], shape: tuple[int, ...], dtype: Any, columns: int | None = None
    ) -> None:
        super().__init__(path, shape, dtype)
        check_images(self)
        self._columns = columns or math.isqrt(self.shape[0] - 1) + 1  # ceil(sqrt N), in integers
        self._lines = -(-self.shape[0] // columns) if columns else self._columns
        self._height, self._width = self._lines * self.shape[1], self._columns * self.shape[2]
        if max(self._height, self._width) > _MAX_SIDE:
            raise self._too_large(f"at most {_MAX_SIDE:,} pixels per side")
        self._tiles = np.zeros((self._columns, self.shape[1], self.shape[2], 3), np.uint8)

    @abc.abstractmethod
    def _write_band(self, file: IO[bytes], band: int, pixels: Array) -> None:
        """Write a line of tiles, (tile height, self._width, 3) RGB; called for 0, 1, ... self._lines - 1."""

    def _append(self, file: IO[bytes], rows: Array) -> None:
        colours = self.shape[3] if len(self.shape) == 4 else 1
        images = to_pixels(rows).reshape(len(rows), *self.shape[1:3], colours)
        done = 0
        while done < len(images):
            band, column = divmod(self.rows + done, self._columns)
            count = min(self._columns - column, len(images) - done)
            self._tiles[column : column + count] = images[done : done + count]  # gray is broadcast to all channels
            done += count
            is_last = self.rows + done == self.shape[0]
            if is_last or column + count == self._columns:
                for each in range(band, self._lines if is_last else band + 1):  # the rest is black
                    self._write_band(file, each, self._tiles.transpose(1, 0, 2, 3).reshape(-1, self._width, 3))
                    self._tiles[...] = 0

    def _too_large(self, expected: str) -> InputError:
        got = f"{self._width:,} x {self._height:,} pixels"
        hint = f"fewer rows, or -o {self.path.with_suffix('.npy')}"
        return InputError(f"cannot write {self.path}: the image is too large", got=got, expected=expected, hint=hint)


class BmpWriter(_TileWriter):
    """24 bits per pixel: blue, green, red; bottom line first, each padded to a multiple of 4 bytes."""

    def __init__(
        self, path: str | os.PathLike[str], shape: tuple[int, ...], dtype: Any, columns: int | None = None
    ) -> None:
        super().__init__(path, shape, dtype, columns)
        self._line_bytes = (self._width * 3 + 3) // 4 * 4
        self._file_bytes = _BMP_HEADER_BYTES + self._line_bytes * self._height
        if self._file_bytes > _MAX_BMP_BYTES:
            raise self._too_large(f"at most {_MAX_BMP_BYTES:,} B in a .bmp; a .png has no such limit")

    def _begin(self, file: IO[bytes]) -> None:
        file.write(struct.pack("<2sIHHI", b"BM", self._file_bytes, 0, 0, _BMP_HEADER_BYTES))
        sizes = self._width, self._height, 1, 24, 0, self._file_bytes - _BMP_HEADER_BYTES
        file.write(struct.pack("<IiiHHIIiiII", 40, *sizes, 0, 0, 0, 0))

    def _write_band(self, file: IO[bytes], band: int, pixels: Array) -> None:
        lines = np.zeros((len(pixels), self._line_bytes), np.uint8)
        lines[:, : self._width * 3] = pixels[::-1, :, ::-1].reshape(len(pixels), -1)
        file.seek(_BMP_HEADER_BYTES + (self._lines - 1 - band) * lines.size)
        file.write(lines.data)


class PngWriter(_TileWriter):
    """8 bits per channel, no filter, zlib level 1: higher levels do not compress images of faces further."""

    def _begin(self, file: IO[bytes]) -> None:
        self._packer = zlib.compressobj(1)
        file.write(b"\x89PNG\r\n\x1a\n")
        _write_chunk(file, b"IHDR", struct.pack(">IIBBBBB", self._width, self._height, 8, 2, 0, 0, 0))
        _write_chunk(file, b"tEXt", b"Description\0" + SYNTHETIC.encode())

    def _write_band(self, file: IO[bytes], band: int, pixels: Array) -> None:
        lines = np.zeros((len(pixels), 1 + self._width * 3), np.uint8)  # leading byte: no filter
        lines[:, 1:] = pixels.reshape(len(pixels), -1)
        packed = self._packer.compress(lines.data)
        if band == self._lines - 1:
            packed += self._packer.flush()
        _write_chunk(file, b"IDAT", packed)
        if band == self._lines - 1:
            _write_chunk(file, b"IEND", b"")


def _write_chunk(file: IO[bytes], kind: bytes, data: bytes) -> None:
    file.write(struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)))
