"""dx of a max or min along axes, and of the max over a sequence: host side of gradient/extreme_grad.cu."""

from __future__ import annotations

import math
from collections.abc import Iterator
from ctypes import c_int64, c_uint32, c_void_p
from dataclasses import dataclass
from pathlib import Path

from onchip.kernels.axes import axes_last, middle_of
from onchip.kernels.cuda.common.arguments import NOTHING, Argument, Input, Int64, Output, Scratch, Struct, UInt32
from onchip.kernels.cuda.common.c_struct import CStruct
from onchip.kernels.cuda.common.dtypes import FLOATS
from onchip.kernels.cuda.common.fast_divide import MAX_ELEMENTS
from onchip.kernels.cuda.common.kernel import instance
from onchip.kernels.cuda.common.permute import permute
from onchip.kernels.cuda.common.precision import round_up
from onchip.kernels.cuda.common.program import Budget, Instance, KernelLaunch, Program, Steps, grid_1d
from onchip.kernels.cuda.common.rows import THREADS, RowThreads
from onchip.kernels.cuda.gradient.kernel import OneDtypeKernel
from onchip.network.graph import Network
from onchip.network.layers import GlobalMax, GlobalMin, InputGrad, SequenceMax
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal, Use
from onchip.plan.layout import CHANNELS_LAST, ROWS, has_channels, stored_type

SOURCE = Path(__file__).with_suffix(".cu")
BLOCKS_PER_SM, WAVES = 8, 32
EXTREMES = (GlobalMax, GlobalMin, SequenceMax)


class LengthsStruct(CStruct):
    source, c_name = SOURCE, "Lengths"
    _fields_ = (
        ("lengths", c_void_p), ("are_wide", c_uint32), ("each", c_uint32), ("window", c_int64), ("stride", c_int64),
    )  # fmt: skip


@dataclass(frozen=True)
class Sequences:
    """The second input: the length of each row's sequence."""

    are_wide: bool  # int64
    each: int  # (outer, N, inner) as extreme_grad sees them: consecutive outer rows per length
    window: int
    stride: int


@dataclass(frozen=True)
class ExtremeGradLowering:
    """extreme_grad_rows(x, dy, dx, outer, N, lengths) or extreme_grad_columns(x, dy, dx, outer, N, inner, lengths)"""

    is_min: bool
    dtype: str
    row_shape: tuple[int, ...]  # as stored
    axes: tuple[int, ...]  # of the whole array, batch first
    units: int
    sequences: Sequences | None = None

    def at(self, B: int) -> Steps:
        shape, count = (B, *self.row_shape), B * math.prod(self.row_shape)
        if not count:
            return Steps(())
        if (middle := middle_of(shape, self.axes)) is not None:
            return Steps((self._launch(middle, Input(0), Output(0)),))
        order, dtypes = axes_last(len(shape), self.axes), (self.dtype, self.dtype)
        N, moved = math.prod(shape[a] for a in self.axes), [shape[a] for a in order]
        nbytes = round_up(DTYPE_BYTES[self.dtype] * count, 16)
        back = [order.index(axis) for axis in range(len(shape))]
        return Steps(
            (
                permute(dtypes, shape, order, self.units, Input(0), Scratch(0)),
                self._launch((count // N, N, 1), Scratch(0), Scratch(nbytes)),
                permute(dtypes, moved, back, self.units, Scratch(nbytes), Output(0)),
            ),
            2 * nbytes,
        )

    def _launch(self, middle: tuple[int, int, int], x: Argument, dx: Argument) -> KernelLaunch:
        (outer, N, inner), types = middle, f"{str(self.is_min).lower()}, {FLOATS[self.dtype]}"
        threads = RowThreads.of(N, self.dtype)
        lanes, dy = threads.lanes or THREADS, Input(1 + (self.sequences is not None))
        name, count = f"rows<{types}, {threads.vector}, {lanes}>", outer * lanes
        sizes: tuple[Argument, ...] = (Int64(outer), UInt32(N))
        if inner > 1:
            name, sizes, count = f"columns<{types}>", (*sizes, Int64(inner)), outer * inner
        config = grid_1d(min(-(-count // THREADS), self.units * BLOCKS_PER_SM * WAVES))
        program, budget = Program(SOURCE, f"extreme_grad_{name}"), Budget(registers=64)
        return KernelLaunch(program, config, (x, dy, dx, *sizes, self._lengths()), budget)

    def _lengths(self) -> Struct:
        if self.sequences is None:
            return LengthsStruct.of(lengths=NOTHING, are_wide=0, each=1, window=0, stride=1)
        return LengthsStruct.of(lengths=Input(1), **vars(self.sequences))


class ExtremeGradKernel(OneDtypeKernel):
    name = "extreme_grad"
    layers = (InputGrad,)

    def applies(self, net: Network, start: int) -> bool:
        layer = net.nodes[start].layer
        return isinstance(layer, InputGrad) and isinstance(layer.of, EXTREMES)

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        of, x, dy = node.layer.attributes()["of"], net.types[node.inputs[0]], net.types[node.inputs[-1]]
        if x.row_size >= MAX_ELEMENTS:
            yield Refusal(self.name, node.name, f"supports rows of fewer than {MAX_ELEMENTS:,} elements, not {x}")
            return
        rank = len(x.shape)
        axes = (2,) if isinstance(of, SequenceMax) else tuple(sorted(axis % rank for axis in of.axes))
        may_be_nhwc = axes == tuple(range(2, rank)) and has_channels(x) and bool(net.readers(node.name))
        for layout in (ROWS, CHANNELS_LAST) if may_be_nhwc else (ROWS,):
            is_nhwc, sequences = layout == CHANNELS_LAST, None
            if isinstance(of, SequenceMax):
                is_wide = net.types[node.inputs[1]].dtype == "int64"
                sequences = Sequences(is_wide, 1 if is_nhwc else x.row_shape[0], of.window, of.stride)
            lowering = ExtremeGradLowering(
                isinstance(of, GlobalMin), x.dtype, stored_type(x, layout).row_shape,
                tuple(range(1, rank - 1)) if is_nhwc else axes, device.units, sequences,
            )  # fmt: skip
            launches = 1 if middle_of((2, *lowering.row_shape), lowering.axes) else 3
            yield self.claim(
                net, node, lowering, label=f"{of.kind.lower()}_grad<{','.join(map(str, axes))}>",
                cost=Cost(net.row_flop(node), 2 * launches * x.row_bytes + dy.row_bytes, 0, launches, "fp32"),
                reads={node.inputs[0]: Use(layout, is_read_often=True)},
                writes={node.name: layout} if is_nhwc else {},
            )  # fmt: skip


def _instance(name: str, N: int, inner: int = 1, dtype: str = "float32") -> Instance:
    shape = (12, N, inner) if inner > 1 else (12, N)
    return instance(name, ExtremeGradLowering(False, dtype, shape, (2,), 132))


INSTANCES = (
    _instance("rows", 196), _instance("odd rows", 49), _instance("long rows", 4096), _instance("columns", 49, 512),
    _instance("rows of float16", 196, dtype="float16"), _instance("columns, bfloat16", 49, 512, "bfloat16"),
    _instance("doubles", 196, dtype="float64"), _instance("columns of doubles", 49, 512, "float64"),
)  # fmt: skip
