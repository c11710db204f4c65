"""The rows of a step from a data set on the GPU: host side of gradient/step_rows.cu."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from ctypes import c_int64, c_uint32, c_void_p
from dataclasses import dataclass, replace
from pathlib import Path

from onchip.kernels.cuda.common.arguments import NOTHING, Int64, Output, Struct, UInt32, Weight
from onchip.kernels.cuda.common.c_struct import CStruct
from onchip.kernels.cuda.common.kernel import CudaKernel, instance
from onchip.kernels.cuda.common.program import Budget, KernelLaunch, Program, Steps, grid_1d
from onchip.kernels.dataset_run import IDS, ROW, ROWS, ReadArray, StepRows, claim_rows
from onchip.network.graph import Network
from onchip.network.layers import RowIds, StepRow
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job

SOURCE = Path(__file__).with_suffix(".cu")
THREADS, MAX_ARRAYS, MAX_WORD_BYTES = 256, 24, 16


class DataArrayStruct(CStruct):
    source, c_name = SOURCE, "DataArray"
    _fields_ = (
        ("data", c_void_p), ("y", c_void_p), ("rows", c_int64), ("row_words", c_int64), ("first_block", c_uint32),
        ("kind", c_uint32), ("word_bytes", c_uint32), ("lane_bits", c_uint32),
    )  # fmt: skip


class DataArraysStruct(CStruct):
    source, c_name = SOURCE, "DataArrays"
    _fields_ = (("array", DataArrayStruct * MAX_ARRAYS),)


@dataclass(frozen=True)
class StepRowsLowering:
    """step_rows(arrays, count, order, position, ids, B)"""

    step: StepRows

    def at(self, B: int) -> Steps:
        arrays = self.step.arrays
        return Steps(
            tuple(self._launch(arrays[i : i + MAX_ARRAYS], B) for i in range(0, len(arrays), MAX_ARRAYS)),
        )

    def _launch(self, arrays: Sequence[ReadArray], B: int) -> KernelLaunch:
        first_blocks = [0, *itertools.accumulate(_blocks(each, B) for each in arrays)]
        structs = [_struct(each, first) for each, first in zip(arrays, first_blocks, strict=False)]
        arguments = (
            DataArraysStruct.of(array=structs), UInt32(len(arrays)), Weight("order") if self.step.ids else NOTHING,
            Weight("position"), Int64(self.step.ids), Int64(B),
        )  # fmt: skip
        return KernelLaunch(
            Program(SOURCE, "step_rows"), grid_1d(first_blocks[-1], THREADS), arguments, Budget(40), after=()
        )


def _blocks(array: ReadArray, B: int) -> int:
    return -(-((1 if array.kind == ROW else B) << _lane_bits(array)) // THREADS)


def _word_bytes(array: ReadArray) -> int:
    return math.gcd(array.row_bytes, MAX_WORD_BYTES)


def _lane_bits(array: ReadArray) -> int:
    """log2 of the threads per row: one per word, up to a block."""
    words = array.row_bytes // _word_bytes(array)
    return min(max(words, 1) - 1, THREADS - 1).bit_length() if array.kind != IDS else 0


def _struct(array: ReadArray, first_block: int) -> Struct:
    nbytes = _word_bytes(array)
    return DataArrayStruct.of(
        data=Weight(array.data) if array.data else NOTHING, y=Output(array.output), rows=array.rows,
        row_words=array.row_bytes // nbytes, first_block=first_block, kind=array.kind, word_bytes=nbytes,
        lane_bits=_lane_bits(array),
    )  # fmt: skip


class StepRowsKernel(CudaKernel):
    name = "step_rows"
    layers = (RowIds, StepRow)
    dtypes = DTYPE_BYTES

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim]:
        claim = claim_rows(self.name, net, start)
        if claim is not None:
            assert isinstance(claim.facts, StepRows)
            yield replace(claim, facts=StepRowsLowering(claim.facts))


INSTANCES = (
    instance(
        "images and classes",
        StepRowsLowering(
            StepRows((ReadArray(ROWS, 0, "x", 60_000, 3136), ReadArray(ROWS, 1, "target", 60_000)), 60_000)
        ),
    ),
)
