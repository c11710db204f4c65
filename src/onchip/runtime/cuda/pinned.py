"""Pinned host memory, which a GPU can read and write directly."""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from onchip.errors import DeviceError
from onchip.network.recipe import Array
from onchip.runtime.cuda.driver import OUT_OF_MEMORY, fail
from onchip.runtime.cuda.gpu import Gpu

MAX_ARRAYS = 64  # of callers, cached


class PinnedBuffer:
    """Freed when it is collected: no work on the GPU may use it then."""

    def __init__(self, gpu: Gpu, nbytes: int) -> None:
        self._gpu, driver = gpu, gpu.driver
        flags = driver.CU_MEMHOSTALLOC_PORTABLE | driver.CU_MEMHOSTALLOC_DEVICEMAP
        with gpu, gpu.relaxed():
            code, pointer = driver.cuMemHostAlloc(nbytes, flags)
        if int(code) == OUT_OF_MEMORY:
            hint = "free host memory, or raise the limit: ulimit -l"
            raise DeviceError("cannot allocate pinned host memory", got=f"{nbytes:,} B requested", hint=hint)
        if code:
            fail(int(code), f"allocating {nbytes:,} B of pinned memory")
        self.pointer = int(pointer)
        self.bytes: Array = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(self.pointer))

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if hasattr(self, "pointer") and not is_ending():
            with self._gpu, self._gpu.relaxed():
                self._gpu.driver.cuMemFreeHost(self.pointer)


class PinnedArrays:
    """Detects callers' arrays that are already pinned (torch's pin_memory): they are not staged.

    The driver is queried once per array, which costs a few us. The answer is cached with the array: if its memory is
    pinned or unpinned later, copies stay correct, only slower.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._known: dict[int, tuple[weakref.ref[Array], int]] = {}  # by the array's id

    def pointer(self, array: Array) -> int:
        """Its address; 0 if it is not pinned."""
        found = self._known.get(id(array))
        if found is None or found[0]() is not array:
            if len(self._known) >= MAX_ARRAYS:
                self._known.clear()
            found = self._known[id(array)] = weakref.ref(array), array.ctypes.data if self._is_pinned(array) else 0
        return found[1]

    def _is_pinned(self, array: Array) -> bool:
        if not array.nbytes:
            return False
        driver, begin = self._gpu.driver, array.ctypes.data
        kind: Any = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        host = int(driver.CUmemorytype.CU_MEMORYTYPE_HOST)
        types = (driver.cuPointerGetAttribute(kind, end) for end in (begin, begin + array.nbytes - 1))
        return all(not code and int(found) == host for code, found in types)
