"""plain: the general path. Any single layer in any dtype, by the reference's NumPy functions.

Same bits: BLAS and NumPy's sums may change their order with the shape and the thread count. So layers with either run
row by row, and BLAS uses one thread. A convolution and a MatMul run in blocks of rows nevertheless: NumPy multiplies
their stack of matrices one by one, at most a batch row each. All other layers compute each element from its own inputs
in one order.
"""

from __future__ import annotations

import functools
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onchip.kernels.chain import in_layouts
from onchip.kernels.cpu.cost import CPU
from onchip.kernels.cpu.kernel import CpuKernel
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    AvgPool1d,
    AvgPool2d,
    Broadcast,
    Cast,
    Convolution,
    CumSum,
    Div,
    Elementwise,
    GlobalMax,
    GlobalMean,
    GlobalMin,
    GlobalNorm,
    GlobalSum,
    InputGrad,
    Layer,
    Linear,
    LinearResize,
    LogSoftmax,
    MatMul,
    MaxPool1d,
    MaxPool2d,
    Mod,
    Recurrent,
    RecurrentGrad,
    RowNorm,
    SequenceMax,
    Softmax,
    ToInts,
    TokenConv,
    TransposedConvolution,
    WeightGrad,
)
from onchip.network.layers.conv import conv_groups
from onchip.network.recipe import Array, Recipe, as_is
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job

_ROW_BY_ROW = (Linear, Recurrent, Softmax, LogSoftmax, GlobalMean, GlobalSum, GlobalNorm, RowNorm)
_USES_BLAS = (Linear, Recurrent, MatMul, Convolution, TransposedConvolution)
_SUMS = (Softmax, LogSoftmax, GlobalMean, GlobalSum, GlobalNorm, RowNorm, AvgPool1d, AvgPool2d, TokenConv, CumSum)
_BLOCK_BYTES = 1 << 20  # read and written per block of rows: it stays in cache

_IN_SHORT_SUMS = (
    *_ROW_BY_ROW, Convolution, TransposedConvolution, GlobalMax, GlobalMin, SequenceMax, MaxPool1d, MaxPool2d,
    AvgPool1d, AvgPool2d,
)  # fmt: skip


_BLAS_LOCK = threading.Lock()  # the BLAS thread limit is per process: one call at a time
if hasattr(os, "register_at_fork"):
    # A child forked while another thread holds it would deadlock.
    os.register_at_fork(after_in_child=_BLAS_LOCK._at_fork_reinit)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class NumpyCost(Cost):
    """The same work at NumPy's speed."""

    slower: int = CPU.numpy_factor

    def estimate_us(self, device: Device, precision: str, B: int) -> float:
        launches = self.launches * device.launch_us
        return self.slower * (super().estimate_us(device, precision, B) - launches) + launches


@dataclass(frozen=True)
class Facts:
    layer: Layer
    reads: tuple[int, ...]  # input index of each operand: a value that is read twice is one input


class PlainKernel(CpuKernel):
    name = "plain"
    layers = (Layer,)
    dtypes = DTYPE_BYTES

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim]:
        node = net.nodes[start]
        values = tuple(dict.fromkeys(node.inputs))
        moved = sum(net.types[name].row_bytes for name in values)
        written = net.types[node.name].row_bytes
        recipes = {}
        for role, name in node.weights.items():
            weight_type = net.weight_type(name)
            recipes[role] = Recipe.of(as_is, (name,), net.weights[name].shape, weight_type.dtype)
        fixed = sum(recipe.nbytes for recipe in recipes.values())
        if net.types[node.name].is_batched == net.types[node.inputs[0]].is_batched:
            moved += written
        else:
            fixed += written
        looked_up = net.row_lookup_elements(node)
        if looked_up:  # only these rows of the table are read
            fixed -= recipes["weight"].nbytes
        moved += (looked_up + 2 * _between(net, node)) * DTYPE_BYTES[net.types[node.name].dtype]
        slower = CPU.numpy_sum_factor if isinstance(node.layer, _IN_SHORT_SUMS) else CPU.numpy_factor
        slower = CPU.numpy_gather_factor if isinstance(node.layer, LinearResize) else slower
        input_index = {name: i for i, name in enumerate(values)}
        cost = NumpyCost(net.row_flop(node), moved, fixed, CPU.numpy_launch_factor, slower=slower)
        facts = Facts(node.layer, tuple(input_index[name] for name in node.inputs))
        claim = self.claim(
            net, node, facts, cost=cost, why="single layer, in NumPy", recipes=recipes, order=_order(node.layer),
            is_fallback=True,
        )  # fmt: skip
        yield from in_layouts(net, node, claim) if _is_elementwise(net, node) else (claim,)

    def bind(self, claim: Claim, weights: dict[str, Array]) -> Callable[[Sequence[Array], Sequence[Array], int], None]:
        facts = claim.facts
        assert isinstance(facts, Facts)
        layer = facts.layer

        def run(inputs: Sequence[Array], outputs: Sequence[Array], threads: int) -> None:
            y, w = outputs[0], {role: _as_float32(weight) for role, weight in weights.items()}
            if layer.crosses_rows:
                with np.errstate(all="ignore"):
                    y[...] = layer.forward(tuple(_as_float32(inputs[i]) for i in facts.reads), w)
                return
            step = 1
            if isinstance(layer, Div | Mod):  # their errors report the row's index in the batch
                step = max(1, len(y))
            elif not isinstance(layer, _ROW_BY_ROW):
                step = max(1, _BLOCK_BYTES * len(y) // max(1, sum(array.nbytes for array in (*inputs, y))))
            with np.errstate(all="ignore"):  # NaN and Inf pass through, as everywhere in onchip
                for first in range(0, len(y), step):
                    rows = slice(first, first + step)
                    y[rows] = layer.forward(tuple(_as_float32(inputs[i][rows]) for i in facts.reads), w)

        def run_with_blas(inputs: Sequence[Array], outputs: Sequence[Array], threads: int) -> None:
            with _BLAS_LOCK, _blas_libraries().limit(limits=1):
                run(inputs, outputs, threads)

        of = layer.of if isinstance(layer, InputGrad | WeightGrad | RecurrentGrad) else layer
        return run_with_blas if isinstance(of, _USES_BLAS) else run


def _is_elementwise(net: Network, node: Node) -> bool:
    """Whether the layer is elementwise: it then runs in any layout."""
    if isinstance(node.layer, Broadcast):
        return not node.weights and len({x.shape for x in net.input_types(node)}) == 1
    return isinstance(node.layer, Elementwise | Cast | ToInts)


def _order(layer: Layer) -> str:
    if isinstance(layer, _USES_BLAS):
        return "NumPy's BLAS on one thread, by the row's shape"
    return "NumPy's, by the row's shape" if isinstance(layer, _SUMS) else ""


def _between(net: Network, node: Node) -> int:
    """Elements per row of temporary arrays that NumPy writes and reads."""
    if isinstance(node.layer, TokenConv):
        return 3 * net.row_lookup_elements(node)  # each tap is gathered, cropped and added
    if isinstance(node.layer, Convolution):  # im2col
        C_out, *window = net.weights[node.weights["weight"]].shape
        return net.types[node.name].row_size // C_out * math.prod(window) * conv_groups(node.layer)
    if isinstance(node.layer, TransposedConvolution):  # the outputs of its taps, before they are added
        C_in, *window = net.weights[node.weights["weight"]].shape
        return net.types[node.inputs[0]].row_size // C_in * math.prod(window) * conv_groups(node.layer)
    return 0


def _as_float32(array: Array) -> Array:
    """Narrower floats as float32; the result is rounded once, at the store."""
    narrow = "float" in array.dtype.name and array.dtype.itemsize < 4
    return array.astype(np.float32) if narrow else array


@functools.cache
def _blas_libraries() -> Any:
    import threadpoolctl

    return threadpoolctl.ThreadpoolController().select(user_api="blas")
