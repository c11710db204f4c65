"""The launches of a claim made ready on a GPU: the one way in which engines, scans and ladders launch kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onchip.kernels.cuda.program import (
    Input,
    Int64,
    KernelLaunch,
    Output,
    Pointer,
    Scratch,
    Steps,
    Struct,
    UInt32,
    Weight,
)
from onchip.runtime.cuda.gpu import Buffer, Call, Function, Gpu


class BoundSteps:
    """Steps for one number of rows, compiled and loaded, everything written down but the pointers of a call.

    Not for two threads at a time: the pointers are written in place.
    """

    def __init__(self, gpu: Gpu, steps: Steps, weights: Mapping[str, Buffer] | None = None) -> None:
        """weights  what the claim's recipes made, by name; they are kept"""
        self.scratch_bytes = steps.scratch_bytes
        self.functions: list[Function] = []
        self.calls: list[Call] = []
        self._weights = weights or {}
        self._inputs: list[tuple[Any, int]] = []  # an argument, and the number of the input whose pointer it is
        self._outputs: list[tuple[Any, int]] = []
        self._scratches: list[tuple[Any, int]] = []  # and the offset
        for launch in steps.launches:
            self._bind(gpu, launch)

    def _bind(self, gpu: Gpu, launch: KernelLaunch) -> None:
        function = gpu.load(launch.program, launch.config.shared_bytes)
        arguments: list[Any] = []
        for argument in launch.arguments:
            match argument:
                case UInt32(value):
                    arguments.append(ctypes.c_uint32(value))
                case Struct(pointers, data):
                    whole = ctypes.create_string_buffer(8 * len(pointers) + len(data))
                    for i, pointer in enumerate(pointers):
                        self._fill(ctypes.c_uint64.from_buffer(whole, 8 * i), pointer)
                    ctypes.memmove(ctypes.addressof(whole) + 8 * len(pointers), data, len(data))
                    arguments.append(whole)
                case _:
                    arguments.append(ctypes.c_uint64(0))
                    self._fill(arguments[-1], argument)
        self.functions.append(function)
        self.calls.append(Call(gpu, function, launch.config, arguments))

    def _fill(self, word: Any, argument: Pointer | Int64) -> None:
        """What is known of 8 bytes now, or which pointer of a call they will be."""
        match argument:
            case Weight(name):
                word.value = self._weights[name].pointer
            case Int64(value):
                word.value = value
            case Input(number) | Output(number) | Scratch(number):
                kinds = {Input: self._inputs, Output: self._outputs, Scratch: self._scratches}
                kinds[type(argument)].append((word, number))

    def enqueue(
        self, inputs: Sequence[int], outputs: Sequence[int], scratch: int, stream: int,
        behind: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """Put the launches on a stream.

        inputs, outputs  pointers, in the order of the group's
        scratch          pointer to `scratch_bytes` for this call alone
        behind           called after each launch
        """
        for argument, index in self._inputs:
            argument.value = inputs[index]
        for argument, index in self._outputs:
            argument.value = outputs[index]
        for argument, offset in self._scratches:
            argument.value = scratch + offset
        for call in self.calls:
            call.launch(stream)
            if behind is not None:
                behind()

    @property
    def pointers(self) -> tuple[Any, Any] | None:
        """The arguments of the pointers of x and y, if that is all there is: one launch, one of each, no scratch."""
        if len(self.calls) != 1 or len(self._inputs) != 1 or len(self._outputs) != 1 or self._scratches:
            return None
        return self._inputs[0][0], self._outputs[0][0]
