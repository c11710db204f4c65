"""What a training step works on: the model, a block of rows, the data, the rule."""

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

# Columns of the table: one row a layer.
COL_K, COL_N, COL_W, COL_BIAS, COL_CODE, COL_WT, COL_ACT, COL_HAS_BIAS = range(8)


class Model(NamedTuple):
    """What a run trains: weights packed as in mlp_fused, and what goes with each of them."""

    table: Array  # a row a layer, the columns above
    tasks: Array  # the pieces of an update: layer, first column, first k, last k
    w: Array
    bias: Array
    wt: Array  # w transposed, of every layer but the first: the backward pass reads w by columns
    vw: Array  # velocities, or Adam's running mean of the gradients; empty for plain SGD
    vb: Array
    sw: Array  # Adam's running mean of their squares; empty for the others
    sb: Array
    gw: Array  # the gradients of a batch, where it has more than one block, or they are clipped
    gb: Array
    squares: Array  # (tasks,) float64, where they are clipped: the sum of the squares of each piece's gradients


class Block(NamedTuple):
    """What some rows need while they go through together."""

    x: Array  # (rows, D_in) gathered
    acts: Array  # every layer's output, a layer behind the other
    dzs: Array  # gradients by what goes into the activations, laid out like acts
    losses: Array  # a number a row
    correct: Array  # 1 for a row whose largest output is its class's
    zeros: Array  # a bias for products that have none
    bias: Array  # gradients of the biases by these rows


class Crew(NamedTuple):
    """What the workers on blocks of a large batch have."""

    blocks: Array  # (workers, BLOCK_WORDS) int64: places_of(the Block of each)
    gw: Array  # (blocks at a time, len(w)): gradients of each block
    gb: Array
    loss: Array  # (blocks at a time or more,): sums of its losses and hits
    hit: Array


class Data(NamedTuple):
    """The rows of some steps: addresses, but for the order."""

    x: int  # (n, D_in) float32
    targets: int  # (n,) int64 for cross-entropy, (n, D_out) float32 for sums of squares
    weights: int  # (n,) float32: what a row's loss is multiplied by; 0: all by 1
    smoothing: np.float32  # of cross-entropy: the share of a target that all classes have alike
    order: Array  # which rows, batch by batch


class Rule(NamedTuple):
    """How weights follow from gradients: g = scale gradient + decay w, then as _update says for each kind.

    The numbers are those of kernels.training.per_step_values.
    """

    kind: int
    lr: np.float32  # of Adam: lr / (1 - BETA1^step)
    scale: np.float32
    root: np.float32  # of Adam: 1 / sqrt(1 - BETA2^step)
    keep: np.float32  # the share that a step keeps: of momentum's v, of Adam's w
    decay: np.float32
    clip: np.float32  # the longest that a batch's gradient may be; 0: any


@compiled(inline=True)
def rule_of(kind: int, numbers: Array) -> Rule:
    return Rule(kind, numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5])


@compiled(inline=True)
def fetch(where: int, size: int) -> None:
    """Ask for the cache lines of some bytes that will be needed soon."""
    for at in range(where, where + size, LINE_BYTES):
        prefetch(at)


# -- from Python to compiled code, which is told addresses -------------------------------------------------

_PLACE_WORDS = 3  # of an array: where it lies, its length, numbers in each of its rows
BLOCK_WORDS = _PLACE_WORDS * len(Block._fields)
_BIAS = Block._fields.index("bias")
_GW, _GB = Model._fields.index("gw"), Model._fields.index("gb")


def places_of(arrays: Iterable[Array]) -> Array:
    """What model_at, block_at and crew_at read of arrays, which must live as long as it does."""
    return np.array([(each.ctypes.data, len(each), each.size // max(1, len(each))) for each in arrays], np.int64)


# Of the fields that are not float32, their numbers; "[]" behind it: in rows.
_NUMBERS: dict[type[Any], dict[str, str]] = {
    Model: {"table": "int64[]", "tasks": "int64[]", "squares": "float64"},
    Block: {"losses": "float64", "correct": "int64"},
    Crew: {"blocks": "int64[]", "gw": "float32[]", "gb": "float32[]", "loss": "float64", "hit": "int64"},
}


def _type_of(kind: type[Any], field: str) -> Any:
    number, rows, _ = _NUMBERS[kind].get(field, "float32").partition("[]")
    return types.Array(getattr(types, number), 2 if rows else 1, "C")


def _build(context: Any, builder: Any, places: Any, kind: type[Any], field: str) -> Any:
    """In LLVM: an array of a Model, Block or Crew."""
    made, first = _type_of(kind, field), kind._fields.index(field) * _PLACE_WORDS
    words = (builder.add(places, emit.INT(8 * (first + i))) for i in range(1 + made.ndim))
    where, *shape = (emit.load(builder, word, emit.INT) for word in words)
    return build_array(context, builder, made, where, shape)


def _tuple_at(kind: type[Any]) -> Any:
    """A function for compiled code: the Model, Block or Crew whose places lie at an address."""

    @intrinsic
    def arrays(typing_context: Any, places: Any) -> Any:
        made = types.BaseTuple.from_types([_type_of(kind, field) for field in kind._fields], kind)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            built = [_build(context, builder, args[0], kind, field) for field in kind._fields]
            return context.make_tuple(builder, made, built)

        return made(types.int64), codegen

    return arrays


def _array_at(kind: type[Any], field: str) -> Any:
    """The same of one of its arrays: some need little, and the rest is not put together for them."""

    @intrinsic
    def array(typing_context: Any, places: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return _build(context, builder, args[0], kind, field)

        return _type_of(kind, field)(types.int64), codegen

    return array


model_at, block_at, crew_at = _tuple_at(Model), _tuple_at(Block), _tuple_at(Crew)
table_at, tasks_at = _array_at(Model, "table"), _array_at(Model, "tasks")


@compiled(inline=True)
def block_of(crew: Crew, worker: int) -> int:
    """The places of a worker's Block."""
    return address(crew.blocks) + worker * BLOCK_WORDS * 8


@compiled(inline=True)
def bias_gradients(block: int) -> int:
    """The address of a Block's `bias`."""
    return int_at(block + _BIAS * _PLACE_WORDS * 8)  # type: ignore[no-any-return]


@compiled(inline=True)
def batch_gradients(model: int) -> tuple[int, int]:
    """The addresses of gw and gb."""
    return int_at(model + _GW * _PLACE_WORDS * 8), int_at(model + _GB * _PLACE_WORDS * 8)


def data_words(x: Array, targets: Array, weights: Array | None, smoothing: float, order: Array) -> Array:
    """What data_at reads; the arrays must live as long as it does.

    order  int64, whose numbers follow each other in memory
    """
    assert order.dtype == np.int64
    assert order.flags.c_contiguous
    places = (each.ctypes.data if each is not None else 0 for each in (x, targets, weights))
    return np.array([*places, np.float32(smoothing).view(np.int32), order.ctypes.data, len(order)], np.int64)


@compiled(inline=True)
def data_at(where: int) -> Data:
    told = ints_at(where, 6)
    return Data(told[0], told[1], told[2], np.int32(told[3]).view(np.float32), ints_at(told[4], told[5]))
