"""Scan an .npy file to another one; both may be larger than memory."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onchip.errors import FormatError, InputError
from onchip.files import atomic_write, check_writable
from onchip.formats.arrays.row_files import open_rows
from onchip.network.reading import naming_file
from onchip.network.recipe import Array
from onchip.network.scan_op import ScanOp, check_axis, check_dtype
from onchip.runtime.cpu.backend import check_threads
from onchip.runtime.scan import find_scan_device, scan_array, scan_into


@dataclass(frozen=True)
class FileReport:
    shape: tuple[int, ...]
    dtype: str
    chosen: str  # the device used, as text
    seconds: float  # including reading and writing

    @property
    def bytes_per_s(self) -> float:
        """Bytes read and written per second."""
        return 2 * int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize / self.seconds


def scan_file(
    source: Path,
    target: Path,
    how: ScanOp,
    axis: int = -1,
    device: str = "auto",
    threads: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> FileReport:
    """Scan the array in `source` along an axis; `target` is written atomically.

    progress  called with the elements done and their total, for 1-D arrays; others are scanned in one call
    """
    check_suffix(target)
    check_writable(target)
    x = map_array(source)
    at = check_axis(axis, x.shape)
    _warm_up(x, how, at, device, threads)
    started = time.perf_counter()
    with write_npy(target, x.shape, x.dtype) as y:
        if x.ndim == 1:
            chosen = scan_into(x, y, how, device, threads, lambda done: progress(done, len(x)))
        else:
            chosen = scan_array(x, y, how, at, device, threads)
    return FileReport(x.shape, x.dtype.name, chosen, time.perf_counter() - started)


def _warm_up(x: Array, how: ScanOp, at: int, device: str, threads: int | None) -> None:
    """Scan a few elements, so that the reported time excludes compiling and loading kernels."""
    from onchip.kernels.cpu.threading.threads import load_helpers

    if find_scan_device(device, threads)[0] is None:
        load_helpers(check_threads(threads))
    few = x[(slice(2),) * x.ndim].copy()
    scan_array(few, few, how, at, device, threads)


def check_suffix(target: Path) -> None:
    if target.suffix.lower() != ".npy":
        got = f"suffix '{target.suffix}'" if target.suffix else "no suffix"
        hint = f"-o {target.with_suffix('.npy')}" if target.name else "-o sums.npy"
        raise InputError(f"cannot write {target}: unknown format", got=got, expected=".npy", hint=hint)


def map_array(path: Path) -> Array:
    """The array of an .npy file, of a dtype that can be scanned; memory-mapped, read-only."""
    text = "numpy.save('x.npy', numpy.loadtxt(...)) converts a text file"
    if path.suffix.lower() != ".npy":
        got = f"suffix '{path.suffix}'" if path.suffix else "no suffix"
        raise FormatError(f"cannot read {path}: unknown format", got=got, expected="an .npy file", hint=text)
    open_rows(path).close()  # checks the header, and the length of the file against it
    try:
        x: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise FormatError(f"cannot read {path}", got=str(error), expected="an .npy file", hint=text) from None
    with naming_file(path):
        check_dtype(x.dtype)
    return x


@contextlib.contextmanager
def write_npy(path: Path, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Iterator[Array]:
    """A memory-mapped array to write to; it becomes the file if the block succeeds."""
    with atomic_write(path) as file:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        begin = file.tell()
        size = begin + int(np.prod(shape)) * dtype.itemsize
        file.truncate(size)
        if hasattr(os, "posix_fallocate"):  # a full disk is reported here; later it would be a SIGBUS
            os.posix_fallocate(file.fileno(), 0, size)
        y = np.memmap(file, dtype, "r+", begin, shape)
        yield y
        y.flush()
