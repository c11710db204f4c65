"""What a training step works on: the model, a block of rows, the data, the rule."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from onchip.kernels.cpu.jit import compiled, int_at, ints_at, pointer, prefetch
from onchip.kernels.cpu.late_numba import carray
from onchip.spec.recipe import Array

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
    hits: Array  # 1 for a row whose largest output is its class's
    zeros: Array  # a bias for products that have none
    bias: Array  # gradients of the biases by these rows


class Crew(NamedTuple):
    """What the workers on blocks of a large batch have: a Block's arrays for each of them, gradients for each block."""

    x: Array  # (workers, ...), as the six below
    acts: Array
    dzs: Array
    losses: Array
    hits: Array
    zeros: Array
    bias: Array
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

    The numbers are those of kernels.training.rules_of_steps.
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


def places_of(arrays: Iterable[Array]) -> Array:
    """What model_at, block_at and crew_at read of arrays, which must live as long as it does."""
    return np.array([(each.ctypes.data, len(each), each.size // max(1, len(each))) for each in arrays], np.int64)


@compiled(inline=True)
def _flat(places: int, i: int, dtype: Any) -> Any:
    at = places + i * _PLACE_WORDS * 8
    return carray(pointer(int_at(at)), (int_at(at + 8),), dtype)


@compiled(inline=True)
def _rows(places: int, i: int, dtype: Any) -> Any:
    at = places + i * _PLACE_WORDS * 8
    return carray(pointer(int_at(at)), (int_at(at + 8), int_at(at + 16)), dtype)


@compiled(inline=True)
def model_at(places: int) -> Model:
    return Model(
        _rows(places, 0, np.int64), _rows(places, 1, np.int64), _flat(places, 2, np.float32),
        _flat(places, 3, np.float32), _flat(places, 4, np.float32), _flat(places, 5, np.float32),
        _flat(places, 6, np.float32), _flat(places, 7, np.float32), _flat(places, 8, np.float32),
        _flat(places, 9, np.float32), _flat(places, 10, np.float32), _flat(places, 11, np.float64),
    )  # fmt: skip


@compiled(inline=True)
def block_at(places: int) -> Block:
    return Block(
        _flat(places, 0, np.float32), _flat(places, 1, np.float32), _flat(places, 2, np.float32),
        _flat(places, 3, np.float64), _flat(places, 4, np.int64), _flat(places, 5, np.float32),
        _flat(places, 6, np.float32),
    )  # fmt: skip


@compiled(inline=True)
def crew_at(places: int) -> Crew:
    return Crew(
        _rows(places, 0, np.float32), _rows(places, 1, np.float32), _rows(places, 2, np.float32),
        _rows(places, 3, np.float64), _rows(places, 4, np.int64), _rows(places, 5, np.float32),
        _rows(places, 6, np.float32), _rows(places, 7, np.float32), _rows(places, 8, np.float32),
        _flat(places, 9, np.float64), _flat(places, 10, np.int64),
    )  # fmt: skip


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
