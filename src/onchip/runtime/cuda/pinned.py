"""Page-locked memory of the host, which a GPU reads and writes itself."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

import numpy as np

from onchip.errors import DeviceError
from onchip.runtime.cuda.driver import OUT_OF_MEMORY, fail
from onchip.runtime.cuda.gpu import Gpu
from onchip.spec.recipe import Array


class PinnedBuffer:
    """It goes back when it is collected: nothing of the GPU's may use it then."""

    def __init__(self, gpu: Gpu, nbytes: int) -> None:
        self._gpu, driver = gpu, gpu.driver
        flags = driver.CU_MEMHOSTALLOC_PORTABLE | driver.CU_MEMHOSTALLOC_DEVICEMAP
        with gpu, gpu.relaxed():
            code, pointer = driver.cuMemHostAlloc(nbytes, flags)
        if int(code) == OUT_OF_MEMORY:
            hint = "free memory of the host, or raise the limit: ulimit -l"
            raise DeviceError("the host's memory cannot be page-locked", got=f"{nbytes:,} B asked for", hint=hint)
        if code:
            fail(int(code), f"page-locking {nbytes:,} B")
        self.pointer = int(pointer)
        self.bytes: Array = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(self.pointer))

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if hasattr(self, "pointer") and not is_ending():
            with self._gpu, self._gpu.relaxed():
                self._gpu.driver.cuMemFreeHost(self.pointer)
