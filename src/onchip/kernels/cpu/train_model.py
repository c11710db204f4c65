"""What a training step works on: the model, a block of rows, the data, the rule."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from onchip.kernels.cpu.jit import compiled, prefetch
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
    """Addresses, but for the order: an array that must not be written would be another type, compiled once more."""

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
