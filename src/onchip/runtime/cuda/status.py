"""Errors that kernels report asynchronously: status words in pinned memory, written by kernels and read by the host.

The memory is mapped, so a call costs nothing: kernels write only on an error, and the host reads its own memory.
"""

from __future__ import annotations

import ctypes
import math
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from onchip.errors import InputError
from onchip.kernels.cuda.common.arguments import StatusWord
from onchip.network.divisors import zero_divisor
from onchip.network.recipe import Array
from onchip.network.tokens import bad_id
from onchip.runtime.cuda.gpu import Gpu
from onchip.runtime.cuda.pinned import PinnedBuffer

STATUS_BYTES = 32  # of a StatusWord: three words of common/status.cuh and one unused
_PAGE_BYTES = 4096
_WORDS, _ID_BITS = 3, 24  # per word: the element's index in the high bits, _ID_BITS bits of the id in the low bits
_CLEAR = 0xFF  # every byte


class StatusWords:
    """The status words of a plan, one set per stream and first row of its launches."""

    def __init__(self, gpu: Gpu, words: Sequence[StatusWord]) -> None:
        self._gpu, self._words = gpu, tuple(words)
        self._pages: list[PinnedBuffer] = []
        self._clear = b""  # the contents of a page without errors
        self._sets: dict[tuple[int, int], Array] = {}  # (words of the plan, 4)
        self._pointers: dict[tuple[int, int], int] = {}  # of the same arrays: querying their address takes some us
        self._lock = threading.Lock()

    def pointer(self, stream: int, first_row: int = 0) -> int:
        """The address that launches on a stream write errors to; their row 0 is the caller's `first_row`."""
        found = self._pointers.get((stream, first_row))
        if found is None:
            with self._lock:
                found = self._pointers[stream, first_row] = int(self._add(stream, first_row).ctypes.data)
        return found

    def _add(self, stream: int, first_row: int) -> Array:
        nbytes = STATUS_BYTES * len(self._words)
        page_bytes = max(_PAGE_BYTES, nbytes)
        in_page = len(self._sets) % (page_bytes // nbytes)
        if not in_page:
            page = PinnedBuffer(self._gpu, page_bytes)
            page.bytes[...] = _CLEAR
            self._clear = bytes(page.bytes)
            self._pages.append(page)
        words = self._pages[-1].bytes[in_page * nbytes : (in_page + 1) * nbytes].view(np.uint64)
        return self._sets.setdefault((stream, first_row), words.reshape(-1, 4))

    def clear(self, stream: int) -> None:
        """Reset the words of an idle stream."""
        for (used_by, _), words in list(self._sets.items()):
            if used_by == stream:
                words.view(np.uint8)[...] = _CLEAR

    def raise_found(self, stream: int) -> None:
        """Raise InputError if a kernel of an earlier call found an error; only then synchronise this call's stream."""
        for page in self._pages:
            if ctypes.string_at(page.pointer, len(self._clear)) != self._clear:
                break
        else:
            return
        with self._gpu:
            if not self._gpu.is_capturing(stream):
                self._gpu.synchronise(stream)  # to report the first bad id in row order, not the first one written
        for key in list(self._sets):
            self.check(*key)

    def check(self, stream: int, first_row: int = 0, offset: int = 0) -> None:
        """Raise InputError for the error in one set of words.

        offset  of row numbers in the message
        """
        found = self._sets[stream, first_row]
        with self._lock:
            for status, values in zip(self._words, found[:, :_WORDS].tolist(), strict=True):
                indices = {word >> _ID_BITS for word in values}
                if len(indices) == 1 and values[0] != (1 << 64) - 1:  # if they differ, a kernel is still writing
                    found.view(np.uint8)[...] = _CLEAR
                    raise _error(status, indices.pop(), values, offset + first_row)

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_ending():
            with self._gpu, self._gpu.relaxed():  # errors are ignored: the first one was reported
                self._gpu.driver.cuCtxSynchronize()  # no kernel may write to memory that is freed now


def _error(status: StatusWord, index: int, values: Sequence[int], first_row: int) -> InputError:
    size = math.prod(status.row_shape)
    mask = (1 << _ID_BITS) - 1
    bits = sum((word & mask) << (_ID_BITS * i) for i, word in enumerate(values)) & ((1 << 64) - 1)
    found = bits - (1 << 64) if bits >> 63 else bits
    position: tuple[Any, ...] = np.unravel_index(index % size, status.row_shape) if status.row_shape else ()
    row, at = first_row + index // size, [int(i) for i in position]
    return bad_id(row, at, found, status.limit, status.ids) if status.limit else zero_divisor(row, at, status.ids)


class Ticket:
    """Work on a stream: `wait` returns when it is done, and raises the errors its kernels found."""

    __slots__ = ("_first_rows", "_gpu", "_stream", "_words")

    def __init__(self, gpu: Gpu, stream: int, words: StatusWords | None, first_rows: Sequence[int]) -> None:
        self._gpu, self._stream, self._words, self._first_rows = gpu, stream, words, first_rows

    def wait(self) -> None:
        self._gpu.synchronise(self._stream)
        self.check()

    def check(self, offset: int = 0) -> None:
        """Raise InputError for errors found. The work must be done; row numbers in messages begin at `offset`."""
        if self._words is not None:
            for first_row in self._first_rows:
                self._words.check(self._stream, first_row, offset)
