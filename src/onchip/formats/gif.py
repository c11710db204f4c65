"""Animations as .gif: each row is a frame of at most 256 colours, chosen for it; they repeat without end."""

from __future__ import annotations

import os
import struct
from typing import IO, Any

import numpy as np

from onchip.errors import InputError
from onchip.formats.arrays.row_files import RowWriter
from onchip.formats.images import SYNTHETIC, check_images, to_pixels
from onchip.network.recipe import Array

DELAY = 8  # hundredths of a second per frame
_MAX_SIDE = (1 << 16) - 1
_COLOURS = 256
_CLEAR, _END, _FIRST = 256, 257, 258  # codes of LZW, with 8 bits per pixel
_MAX_CODES = 1 << 12


class GifWriter(RowWriter):
    """GIF89a: a colour table and one LZW stream per frame."""

    def __init__(self, path: str | os.PathLike[str], shape: tuple[int, ...], dtype: Any) -> None:
        super().__init__(path, shape, dtype)
        check_images(self)
        if max(self.shape[1:3]) > _MAX_SIDE:
            got, hint = f"{self.shape[2]:,} x {self.shape[1]:,} pixels", f"-o {self.path.with_suffix('.npy')}"
            expected = f"at most {_MAX_SIDE:,} pixels per side"
            raise InputError(
                f"cannot write {self.path}: the frames are too large", got=got, expected=expected, hint=hint
            )

    def _begin(self, file: IO[bytes]) -> None:
        file.write(b"GIF89a" + struct.pack("<HHBBB", self.shape[2], self.shape[1], 0x70, 0, 0))
        file.write(b"\x21\xff\x0bNETSCAPE2.0\x03\x01\0\0\0")  # repeat
        file.write(b"\x21\xfe" + _blocks(SYNTHETIC.encode()))

    def _append(self, file: IO[bytes], rows: Array) -> None:
        height, width = self.shape[1:3]
        for i, frame in enumerate(to_pixels(rows).reshape(len(rows), height, width, -1)):
            colours, indices = reduce_colours(frame)
            file.write(b"\x21\xf9" + _blocks(struct.pack("<BHB", 0, DELAY, 0)))
            file.write(b"," + struct.pack("<HHHHB", 0, 0, width, height, 0x87) + colours.tobytes())
            file.write(b"\x08" + _blocks(compress(indices.tobytes())))
            if self.rows + i + 1 == self.shape[0]:
                file.write(b";")


def reduce_colours(frame: Array) -> tuple[Array, Array]:
    """A table of colours (256, 3) and the colour of each pixel, bytes; gray frames stay as they are.

    Median cut over colours of 5 bits per channel: the box with the most pixels times its longest side is split at the
    median of that side, until there are 256; each colour is the mean of a box.
    """
    if frame.shape[-1] == 1:
        return np.repeat(np.arange(_COLOURS, dtype=np.uint8)[:, np.newaxis], 3, axis=1), frame[..., 0]
    cells = frame.astype(np.int64) >> 3
    cells = cells[..., 0] << 10 | cells[..., 1] << 5 | cells[..., 2]
    counts = np.bincount(cells.reshape(-1), minlength=1 << 15)
    sums = [np.bincount(cells.reshape(-1), frame[..., c].reshape(-1), minlength=1 << 15) for c in range(3)]
    used = np.flatnonzero(counts)
    sides = np.stack([used >> 10, used >> 5 & 31, used & 31], axis=1)
    boxes = [_Box(sides, counts[used], np.arange(len(used)))]
    while len(boxes) < _COLOURS and max(box.weight for box in boxes) > 0:
        box = boxes.pop(max(range(len(boxes)), key=lambda i: boxes[i].weight))
        boxes += box.split(sides, counts[used])
    colours, index = np.zeros((_COLOURS, 3), np.uint8), np.zeros(1 << 15, np.uint8)
    for i, box in enumerate(boxes):
        inside = used[box.cells]
        colours[i] = [each[inside].sum() / counts[inside].sum() for each in sums]
        index[inside] = i
    return colours, index[cells]


class _Box:
    """Cells of colours: positions in the arrays that `split` receives."""

    def __init__(self, sides: Array, counts: Array, cells: Array) -> None:
        self.cells = cells
        lengths = np.ptp(sides[cells], axis=0)
        self.axis = int(lengths.argmax())
        self.weight = int(lengths[self.axis]) * int(counts[cells].sum())  # 0: a single cell

    def split(self, sides: Array, counts: Array) -> list[_Box]:
        order = self.cells[np.argsort(sides[self.cells, self.axis], kind="stable")]
        before = np.cumsum(counts[order])
        at = min(max(1, int(np.searchsorted(before, before[-1] / 2))), len(order) - 1)
        return [_Box(sides, counts, part) for part in (order[:at], order[at:])]


def compress(pixels: bytes) -> bytes:
    """LZW as in GIF: codes of 9 to 12 bits, lowest bit first; the table is cleared when it is full."""
    out, bits, held = bytearray(), _CLEAR, 9  # bits that are not yet a byte, and their number
    width, following, table = 9, _FIRST, dict[int, int]()
    prefix = pixels[0]
    for pixel in pixels[1:]:
        key = prefix << 8 | pixel
        if key in table:
            prefix = table[key]
            continue
        bits |= prefix << held
        held += width
        prefix = pixel
        if following < _MAX_CODES:
            table[key] = following
            width += following >> width  # 1 when the next code needs one more bit
            following += 1
        else:
            bits |= _CLEAR << held
            held += width
            width, following = 9, _FIRST
            table.clear()
        while held >= 8:
            out.append(bits & 255)
            bits >>= 8
            held -= 8
    bits |= prefix << held
    held += width
    # The decoder adds an entry for this code, too, and reads the next one with as many bits as that takes.
    bits |= _END << held
    held += width + (following >> width if following < _MAX_CODES else 0)
    out += bits.to_bytes(-(-held // 8), "little")
    return bytes(out)


def _blocks(data: bytes) -> bytes:
    """Blocks of at most 255 bytes, each after its length, and an empty one."""
    parts = [data[i : i + 255] for i in range(0, len(data), 255)]
    return b"".join(bytes([len(part)]) + part for part in parts) + b"\0"
