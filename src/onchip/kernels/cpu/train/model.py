"""The arrays and options of a training step: the model, a block of rows, the data, the optimiser."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from onchip.kernels.cpu.compiler import emit
from onchip.kernels.cpu.compiler.jit import address, build_array, compiled, int_at, ints_at, prefetch
from onchip.kernels.cpu.compiler.late_numba import intrinsic, types
from onchip.network.recipe import Array

CROSS_ENTROPY, HALF_SSE, MSE = range(3)
SGD, MOMENTUM, ADAM = range(3)
LINE_BYTES = 64  # of a cache line

# Columns of the table: one row per layer.
COL_K, COL_N, COL_W, COL_BIAS, COL_CODE, COL_WT, COL_ACT, COL_HAS_BIAS = range(8)


class Model(NamedTuple):
    """The trained arrays: weights packed as in mlp_fused, and their optimiser state and gradients."""

    table: Array  # a row per layer, the columns above
    tasks: Array  # the tiles of an update: layer, first column, first k, last k
    w: Array
    bias: Array
    wt: Array  # w transposed, of every layer but the first: the backward pass reads w by columns
    vw: Array  # velocities, or Adam's running mean of the gradients; empty for plain SGD
    vb: Array
    sw: Array  # Adam's running mean of squared gradients; else empty
    sb: Array
    gw: Array  # the gradients of a batch, if it has more than one block or they are clipped
    gb: Array
    squares: Array  # (tasks,) float64: each task's sum of squared gradients, if they are clipped


class Block(NamedTuple):
    """Activations, gradients and losses of a block of rows."""

    x: Array  # (rows, D_in) gathered
    acts: Array  # every layer's output, layer after layer
    dzs: Array  # gradients of the pre-activations, laid out like acts
    losses: Array  # per row
    correct: Array  # 1 for a row whose largest output is its class's
    zeros: Array  # the bias of gemms without one
    bias: Array  # bias gradients over these rows


class Scratch(NamedTuple):
    """Scratch for large batches, whose blocks are computed by one worker each."""

    blocks: Array  # (workers, BLOCK_INTS) int64: descriptors_of(the Block of each)
    gw: Array  # (blocks at a time, len(w)): gradients per block
    gb: Array
    loss: Array  # (blocks at a time or more,): per block, the sum of losses and of correct predictions
    correct: Array


class Data(NamedTuple):
    """The rows of several steps; all arrays but `order` are addresses."""

    x: int  # (n, D_in) float32
    targets: int  # (n,) int64 for cross-entropy, (n, D_out) float32 for sums of squares
    weights: int  # (n,) float32 loss weights; 0: all are 1
    smoothing: np.float32  # label smoothing of cross-entropy
    order: Array  # row indices, batch by batch


class Optimiser(NamedTuple):
    """The per-step optimiser values of kernels.training.per_step_values.

    A step computes g = scale * gradient + decay * w, then calls `_update` by kind.
    """

    kind: int
    lr: np.float32  # for Adam: lr / (1 - BETA1^step)
    scale: np.float32
    root: np.float32  # for Adam: 1 / sqrt(1 - BETA2^step)
    keep: np.float32  # factor of momentum's v, or of Adam's w, per step
    decay: np.float32
    clip: np.float32  # the maximum norm of a batch's gradient; 0: no clipping


@compiled(inline=True)
def optimiser_of(kind: int, values: Array) -> Optimiser:
    return Optimiser(kind, values[0], values[1], values[2], values[3], values[4], values[5])


@compiled(inline=True)
def fetch(begin: int, size: int) -> None:
    """Prefetch the cache lines of a range of bytes."""
    for at in range(begin, begin + size, LINE_BYTES):
        prefetch(at)


# -- from Python to compiled code, by address --------------------------------------------------------------

_DESCRIPTOR_INTS = 3  # address, length, elements per row
BLOCK_INTS = _DESCRIPTOR_INTS * len(Block._fields)
_BIAS = Block._fields.index("bias")
_GW, _GB = Model._fields.index("gw"), Model._fields.index("gb")


def descriptors_of(arrays: Iterable[Array]) -> Array:
    """A row per array, for model_at, block_at and scratch_at; the arrays must outlive it."""
    return np.array([(each.ctypes.data, len(each), each.size // max(1, len(each))) for each in arrays], np.int64)


# The dtypes of fields that are not float32; "[]": two-dimensional.
_DTYPES: dict[type[Any], dict[str, str]] = {
    Model: {"table": "int64[]", "tasks": "int64[]", "squares": "float64"},
    Block: {"losses": "float64", "correct": "int64"},
    Scratch: {"blocks": "int64[]", "gw": "float32[]", "gb": "float32[]", "loss": "float64", "correct": "int64"},
}


def _type_of(kind: type[Any], field: str) -> Any:
    dtype, is_matrix, _ = _DTYPES[kind].get(field, "float32").partition("[]")
    return types.Array(getattr(types, dtype), 2 if is_matrix else 1, "C")


def _build(context: Any, builder: Any, descriptors: Any, kind: type[Any], field: str) -> Any:
    """In LLVM: a field of a Model, Block or Scratch, as an array."""
    array_type, first = _type_of(kind, field), kind._fields.index(field) * _DESCRIPTOR_INTS
    addresses = (builder.add(descriptors, emit.INT(8 * (first + i))) for i in range(1 + array_type.ndim))
    ptr, *shape = (emit.load(builder, each, emit.INT) for each in addresses)
    return build_array(context, builder, array_type, ptr, shape)


def _tuple_at(kind: type[Any]) -> Any:
    """A function for compiled code: the Model, Block or Scratch of the descriptors at an address."""

    @intrinsic
    def arrays(typing_context: Any, descriptors: Any) -> Any:
        tuple_type = types.BaseTuple.from_types([_type_of(kind, field) for field in kind._fields], kind)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            built = [_build(context, builder, args[0], kind, field) for field in kind._fields]
            return context.make_tuple(builder, tuple_type, built)

        return tuple_type(types.int64), codegen

    return arrays


def _array_at(kind: type[Any], field: str) -> Any:
    """The same for one field, which costs less than all of them."""

    @intrinsic
    def array(typing_context: Any, descriptors: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return _build(context, builder, args[0], kind, field)

        return _type_of(kind, field)(types.int64), codegen

    return array


model_at, block_at, scratch_at = _tuple_at(Model), _tuple_at(Block), _tuple_at(Scratch)
table_at, tasks_at = _array_at(Model, "table"), _array_at(Model, "tasks")


@compiled(inline=True)
def block_of(scratch: Scratch, worker: int) -> int:
    """The address of a worker's Block."""
    return address(scratch.blocks) + worker * BLOCK_INTS * 8


@compiled(inline=True)
def bias_gradients(block: int) -> int:
    """The address of a Block's `bias`."""
    return int_at(block + _BIAS * _DESCRIPTOR_INTS * 8)  # type: ignore[no-any-return]


@compiled(inline=True)
def batch_gradients(model: int) -> tuple[int, int]:
    """The addresses of gw and gb."""
    return int_at(model + _GW * _DESCRIPTOR_INTS * 8), int_at(model + _GB * _DESCRIPTOR_INTS * 8)


def data_fields(x: Array, targets: Array, weights: Array | None, smoothing: float, order: Array) -> Array:
    """The fields that data_at reads; the arrays must outlive it.

    order  int64, contiguous
    """
    assert order.dtype == np.int64
    assert order.flags.c_contiguous
    addresses = (each.ctypes.data if each is not None else 0 for each in (x, targets, weights))
    return np.array([*addresses, np.float32(smoothing).view(np.int32), order.ctypes.data, len(order)], np.int64)


@compiled(inline=True)
def data_at(ptr: int) -> Data:
    fields = ints_at(ptr, 6)
    return Data(fields[0], fields[1], fields[2], np.int32(fields[3]).view(np.float32), ints_at(fields[4], fields[5]))
