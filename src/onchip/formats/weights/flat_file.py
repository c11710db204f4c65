"""Weight files without a header: float32, little-endian, tensors back to back.

A layout, a list of `FlatTensor`, describes the content. The same layout draws random weights if there is no file.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onchip.errors import FormatError, InputError
from onchip.files import open_input
from onchip.network.reading import naming_file
from onchip.network.recipe import Array, Recipe, recipe_op

_STORED = np.dtype("<f4")
CHUNK = 1 << 18  # elements: the flags stay in cache
_DRAWN_FLOP = 500  # cost of one normal sample in NumPy, in gemm flop


@dataclass(frozen=True)
class FlatTensor:
    """A tensor of a flat file. Random values are normal with mean `center` and deviation `spread`."""

    name: str
    shape: tuple[int, ...]
    spread: float
    center: float = 0.0

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def read_flat(path: str | os.PathLike[str], layout: Sequence[FlatTensor]) -> dict[str, Array]:
    """The tensors of a file by name, as zero-copy views of the mapped file.

    A file of another size is a FormatError that says where it ends. So is a NaN or an infinity, a sign of another
    format or byte order; the check costs less than reading the file.
    """
    source = Path(path)
    with open_input(source) as file, naming_file(source):
        _check_size(os.fstat(file.fileno()).st_size, layout)
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        found, at = {}, 0
        for tensor in layout:
            array: Array = np.ndarray(tensor.shape, _STORED, buffer=mapped, offset=at)
            _check_finite(array, tensor, at)
            found[tensor.name] = array
            at += array.nbytes
    return found


def draw_flat(layout: Sequence[FlatTensor], seed: int) -> dict[str, Recipe]:
    """Random tensors for a layout, drawn when an engine needs them.

    Tensor i of the layout, from 0, is
    `float32(center) + float32(spread) * numpy.random.default_rng([seed, i]).standard_normal(shape, dtype=float32)`.
    """
    if seed < 0:
        raise InputError("bad seed", got=str(seed), expected="at least 0", hint="seed=0")
    return {tensor.name: _drawn(tensor, (seed, i)) for i, tensor in enumerate(layout)}


def _drawn(tensor: FlatTensor, seed: tuple[int, ...]) -> Recipe:
    return Recipe.of(
        draw_normal, (), tensor.shape, flop=_DRAWN_FLOP * tensor.size,
        size=tensor.shape, center=tensor.center, spread=tensor.spread, seed=seed,
    )  # fmt: skip


@recipe_op
def draw_normal(size: tuple[int, ...], center: float, spread: float, seed: tuple[int, ...]) -> Array:
    array = np.random.default_rng(seed).standard_normal(size, dtype=np.float32)
    array *= np.float32(spread)
    array += np.float32(center)
    return array


def _check_size(file_bytes: int, layout: Sequence[FlatTensor]) -> None:
    at = 0
    for tensor in layout:
        end = at + tensor.size * _STORED.itemsize
        if file_bytes < end:
            where = f"inside '{tensor.name}', bytes {at:,} to {end - 1:,}"
            raise _size_error(f"the file ends {where}" if file_bytes else "the file is empty", file_bytes, layout)
        at = end
    if file_bytes > at:
        raise _size_error(f"the file has extra bytes after '{layout[-1].name}', from byte {at:,}", file_bytes, layout)


def _size_error(what: str, file_bytes: int, layout: Sequence[FlatTensor]) -> FormatError:
    count = sum(tensor.size for tensor in layout)
    expected = f"{count * _STORED.itemsize:,} B: {count:,} float32 from '{layout[0].name}' to '{layout[-1].name}'"
    return FormatError(what, got=f"{file_bytes:,} B", expected=expected, hint="the weight file of this network")


def _check_finite(array: Array, tensor: FlatTensor, offset: int) -> None:
    flat = array.reshape(-1)
    for start in range(0, flat.size, CHUNK):
        chunk = flat[start : start + CHUNK]
        is_finite = np.isfinite(chunk)
        if is_finite.all():
            continue
        first = start + int(np.argmin(is_finite))
        index = ", ".join(str(int(i)) for i in np.unravel_index(first, array.shape))
        raise FormatError(
            f"'{tensor.name}'[{index}] is not finite",
            got=f"{flat[first]} at byte {offset + first * _STORED.itemsize:,}",
            expected="finite float32, little-endian", hint="export the weights again: float32, little-endian",
        )  # fmt: skip
