"""plain: the general path. Any layer by itself in any dtype, by the reference's own NumPy functions.

Same bits: NumPy's products (BLAS) and its sums may change their order with the shape and the threads. So layers with
either run row by row, and BLAS gets one thread. A convolution and a MatMul run in blocks of rows all the same: they
multiply a stack of matrices, which NumPy takes one by one, a row of the batch or a part of one each. All other layers
make each number from its own inputs in one order.
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

from onchip.kernels import reference
from onchip.kernels.chain import in_layouts
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
    Layer,
    Linear,
    LinearResize,
    LogSoftmax,
    MatMul,
    MaxPool1d,
    MaxPool2d,
    Mod,
    Recurrent,
    RowNorm,
    SequenceMax,
    Softmax,
    ToInts,
    TokenConv,
    TransposedConvolution,
)
from onchip.network.layers.conv import conv_groups
from onchip.network.recipe import Array, Recipe, as_is
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal

_ROW_BY_ROW = (Linear, Recurrent, Softmax, LogSoftmax, GlobalMean, GlobalSum, GlobalNorm, RowNorm)
_USES_BLAS = (Linear, Recurrent, MatMul, Convolution, TransposedConvolution)
_SUMS = (Softmax, LogSoftmax, GlobalMean, GlobalSum, GlobalNorm, RowNorm, AvgPool1d, AvgPool2d, TokenConv, CumSum)
_BLOCK_BYTES = 1 << 20  # read and written by a block of rows: it stays in cache

# Launches that its price counts: the time of a call for every row or block, in units of a compiled kernel's launch.
_LAUNCHES = 50
# How many times as long one thread of NumPy takes as all cores at their measured rates would. Measured on two cores:
# Concat and Add 3, an Embedding 4, a Permute 4 to 7; TokenConv 3 to 6. Convolutions 6 to 14, once what they keep on the
# way is counted; transposed ones 11 to 40. Short sums and maxima: pools 20 to 40, GlobalMean 36, GlobalMax 100, Linear
# 15 to 300. LinearResize looks every number up, once for each neighbour: 260.
_SLOWER, _MUCH_SLOWER, _BY_PLACES = 4, 20, 200
_IN_SHORT_SUMS = (
    *_ROW_BY_ROW, Convolution, TransposedConvolution, GlobalMax, GlobalMin, SequenceMax, MaxPool1d, MaxPool2d,
    AvgPool1d, AvgPool2d,
)  # fmt: skip


_LIMITED = threading.Lock()  # the limit of BLAS threads is the process's: one call at a time
if hasattr(os, "register_at_fork"):
    # A child that is made while another thread holds it would wait for ever.
    os.register_at_fork(after_in_child=_LIMITED._at_fork_reinit)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class NumpyCost(Cost):
    """The same work at NumPy's pace."""

    slower: int = _SLOWER

    def estimate_us(self, device: Device, precision: str, B: int) -> float:
        launches = self.launches * device.launch_us
        return self.slower * (super().estimate_us(device, precision, B) - launches) + launches


@dataclass(frozen=True)
class Facts:
    layer: Layer
    reads: tuple[int, ...]  # which of the launch's inputs each operand is: a value that is read twice comes in once


class Plain:
    name = "plain"
    device_kind = "cpu"
    precisions = ("fp32",)

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        if job.is_training:
            return
        node = net.nodes[start]
        values = tuple(dict.fromkeys(node.inputs))
        moved = sum(net.types[name].row_bytes for name in (*values, node.name))
        recipes = {}
        for role, name in node.weights.items():
            given = net.weight_type(name)
            recipes[role] = Recipe.of(as_is, (name,), net.weights[name].shape, given.dtype)
        fixed = sum(recipe.nbytes for recipe in recipes.values())
        looked_up = net.row_looked_up(node)
        if looked_up:  # only that is read of a table
            fixed -= recipes["weight"].nbytes
        moved += (looked_up + 2 * _between(net, node)) * DTYPE_BYTES[net.types[node.name].dtype]
        slower = _MUCH_SLOWER if isinstance(node.layer, _IN_SHORT_SUMS) else _SLOWER
        slower = _BY_PLACES if isinstance(node.layer, LinearResize) else slower
        numbers = {name: i for i, name in enumerate(values)}
        cost = NumpyCost(net.row_flop(node), moved, fixed, _LAUNCHES, slower=slower)
        claim = Claim(
            self.name, f"plain<{node.layer.kind}>", (node.name,), cost, "one layer by itself, in NumPy", recipes,
            order=_order(node.layer), facts=Facts(node.layer, tuple(numbers[name] for name in node.inputs)),
            is_fallback=True,
        )  # fmt: skip
        yield from in_layouts(net, node, claim) if _is_by_itself(net, node) else (claim,)

    def bind(self, claim: Claim, weights: dict[str, Array]) -> Callable[[Sequence[Array], Sequence[Array], int], None]:
        facts = claim.facts
        assert isinstance(facts, Facts)
        layer, forward = facts.layer, reference.FORWARD[type(facts.layer)]
        w = {role: _widened(weight) for role, weight in weights.items()}

        def run(inputs: Sequence[Array], outputs: Sequence[Array], threads: int) -> None:
            y = outputs[0]
            step = 1
            if isinstance(layer, Div | Mod):  # which tell of a row: the number that it has in the batch
                step = max(1, len(y))
            elif not isinstance(layer, _ROW_BY_ROW):
                step = max(1, _BLOCK_BYTES * len(y) // max(1, sum(array.nbytes for array in (*inputs, y))))
            with np.errstate(all="ignore"):  # NaN and Inf pass through, as everywhere in onchip
                for first in range(0, len(y), step):
                    rows = slice(first, first + step)
                    y[rows] = forward(layer, tuple(_widened(inputs[i][rows]) for i in facts.reads), w)

        def run_products(inputs: Sequence[Array], outputs: Sequence[Array], threads: int) -> None:
            with _LIMITED, _blas_libraries().limit(limits=1):
                run(inputs, outputs, threads)

        return run_products if isinstance(layer, _USES_BLAS) else run


def _is_by_itself(net: Network, node: Node) -> bool:
    """Whether each number is made of those at its own place: then the layer does not care how they lie."""
    if isinstance(node.layer, Broadcast):
        return not node.weights and len({given.shape for given in net.input_types(node)}) == 1
    return isinstance(node.layer, Elementwise | Cast | ToInts)


def _order(layer: Layer) -> str:
    if isinstance(layer, _USES_BLAS):
        return "that of NumPy's BLAS on one thread, for a row's shape"
    return "NumPy's, for a row's shape" if isinstance(layer, _SUMS) else ""


def _between(net: Network, node: Node) -> int:
    """Numbers of a row that NumPy writes to arrays of its own on the way to the result, and reads again."""
    if isinstance(node.layer, TokenConv):
        return 3 * net.row_looked_up(node)  # each tap is looked up, cut at the edges and added
    if isinstance(node.layer, Convolution):  # its windows, side by side
        C_out, *window = net.weights[node.weights["weight"]].shape
        return net.types[node.name].row_size // C_out * math.prod(window) * conv_groups(node.layer)
    if isinstance(node.layer, TransposedConvolution):  # all that its taps make, before it is added up
        C_in, *window = net.weights[node.weights["weight"]].shape
        return net.types[node.inputs[0]].row_size // C_in * math.prod(window) * conv_groups(node.layer)
    return 0


def _widened(array: Array) -> Array:
    """Narrower floats as float32; the result is rounded once, where it is written."""
    narrow = "float" in array.dtype.name and array.dtype.itemsize < 4
    return array.astype(np.float32) if narrow else array


@functools.cache
def _blas_libraries() -> Any:
    import threadpoolctl

    return threadpoolctl.ThreadpoolController().select(user_api="blas")
