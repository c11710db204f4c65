"""Texture objects: a kernel reads an array through the texture units."""

from __future__ import annotations

import sys
from collections.abc import Callable

from onchip.runtime.cuda.driver import call
from onchip.runtime.cuda.launches import LaunchContext


class TextureObject:
    """Float32 elements in linear memory, which the caller keeps alive; reads past the end return 0."""

    def __init__(self, gpu: LaunchContext, pointer: int, elements: int) -> None:
        self._gpu, driver = gpu, gpu.driver
        resource = driver.CUDA_RESOURCE_DESC()
        resource.resType = driver.CUresourcetype.CU_RESOURCE_TYPE_LINEAR
        resource.res.linear.devPtr = driver.CUdeviceptr(pointer)
        resource.res.linear.format = driver.CUarray_format.CU_AD_FORMAT_FLOAT
        resource.res.linear.numChannels = 1
        resource.res.linear.sizeInBytes = 4 * elements
        with gpu:
            create = driver.cuTexObjectCreate
            self.handle = int(call(create, resource, driver.CUDA_TEXTURE_DESC(), None, doing="creating a texture"))

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if hasattr(self, "handle") and not is_ending():
            with self._gpu:
                self._gpu.driver.cuTexObjectDestroy(self.handle)
