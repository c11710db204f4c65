"""The forward and backward pass of rows: loss, and the gradient of every layer's pre-activation."""

from __future__ import annotations

import numpy as np

from onchip.kernels.cpu.compiler.jit import address, compiled, floats_at, ints_at, linked
from onchip.kernels.cpu.compiler.late_numba import types
from onchip.kernels.cpu.microkernels.activation import activate
from onchip.kernels.cpu.microkernels.dense import CHUNK, dense, multiply_panel, next_panel, padded_width
from onchip.kernels.cpu.microkernels.exponential import expm1_exp
from onchip.kernels.cpu.train.model import (
    COL_ACT,
    COL_BIAS,
    COL_CODE,
    COL_K,
    COL_N,
    COL_W,
    COL_WT,
    CROSS_ENTROPY,
    HALF_SSE,
    Data,
    block_at,
    data_at,
    fetch,
    model_at,
    table_at,
)  # fmt: skip
from onchip.kernels.pointwise import LEAKY, RELU, SIGMOID, TANH
from onchip.network.recipe import Array

FETCH_ROWS = 8  # of the first layer's input, prefetched at a time: within the limit of outstanding misses
_ZERO, _ONE, _NO_FLOOR = np.float32(0), np.float32(1), np.float32(-np.inf)


@compiled()
def _loss_row(z: Array, dz: Array, at: int, N: int, stride: int, code: int, data: Data, row: int) -> tuple[float, int]:
    """The loss of one row with output z[at : at + N], and whether its prediction is correct.

    The gradient goes to dz, with zeros in the columns past N. For MSE it lacks the factor that all rows share. Loss and
    gradient are multiplied by the row's weight.
    """
    for n in range(at + N, at + stride):
        dz[n] = _ZERO
    loss, is_correct = 0.0, 0
    if code == CROSS_ENTROPY:
        highest, best = z[at], at
        for n in range(at + 1, at + N):
            if z[n] > highest:
                highest, best = z[n], n
        total = 0.0
        for n in range(at, at + N):
            _, e = expm1_exp(z[n] - highest)
            dz[n] = e
            total += np.float64(e)
        scale = np.float32(total)
        for n in range(at, at + N):
            dz[n] = dz[n] / scale
        truth = at + ints_at(data.targets, row + 1)[row]
        loss, is_correct = np.log(total), int(best == truth)
        if data.smoothing > _ZERO:
            share, others = np.float64(data.smoothing) / N, 0.0
            for n in range(at, at + N):
                others += np.float64(z[n] - highest)
                dz[n] -= np.float32(share)
            dz[truth] -= _ONE - data.smoothing
            loss -= (1.0 - np.float64(data.smoothing)) * np.float64(z[truth] - highest) + share * others
        else:
            dz[truth] -= _ONE
            loss -= np.float64(z[truth] - highest)
    else:
        target = floats_at(data.targets + row * N * 4, N)
        for n in range(N):
            difference = z[at + n] - target[n]
            loss += np.float64(difference) * np.float64(difference)
            dz[at + n] = difference
        loss *= 0.5 if code == HALF_SSE else 1.0 / N
    if data.weights != 0:
        weight = floats_at(data.weights, row + 1)[row]
        loss *= np.float64(weight)
        for n in range(at, at + N):
            dz[n] *= weight
    return loss, is_correct


@compiled()
def _through_activation(dz: Array, a: Array, begin: int, count: int, N: int, stride: int, code: int) -> None:
    """dz *= f'(z), in terms of the output a = f(z), for rows of N elements from `begin` on."""
    for r in range(count):
        at = begin + r * stride
        grad, out = dz[at : at + N], a[at : at + N]
        if code == RELU:
            for n in range(N):
                grad[n] = grad[n] if out[n] > _ZERO else _ZERO
        elif code == SIGMOID:
            for n in range(N):
                grad[n] = grad[n] * out[n] * (_ONE - out[n])
        elif code == TANH:
            for n in range(N):
                grad[n] = grad[n] * (_ONE - out[n] * out[n])
        elif code & 255 == LEAKY:
            slope = np.int32(code >> 8).view(np.float32)
            for n in range(N):
                grad[n] = grad[n] if out[n] > _ZERO else grad[n] * slope


@compiled()
def rows_address(model: int, block_ptr: int, data_ptr: int, begin: int, count: int) -> int:
    """The address of the block's rows: in x if they are contiguous there, else block.x."""
    block, data, D_in = block_at(block_ptr), data_at(data_ptr), table_at(model)[0, COL_K]
    first = data.order[begin]
    for r in range(1, count):
        if data.order[begin + r] != first + r:
            return address(block.x)
    at: int = data.x + first * D_in * 4
    return at


@linked(*(types.int64,) * 9, types.float32)
def _first_layer(
    x: int, x_row: int, rows: int, w: int, K: int, N_padded: int, bias: int, dst: int, dst_row: int, floor: np.float32
) -> None:
    """dense for rows outside the caches: while a chunk is multiplied, the next one is prefetched."""
    for k in range(0, K, CHUNK):
        left = K - k - CHUNK  # elements of each row after this chunk
        chunk_floor = floor if left <= 0 else _NO_FLOOR
        n = 0
        while n < N_padded:
            width = next_panel(N_padded - n)
            w_at = w + (n * K + k * width) * 4
            for r in range(0, rows, FETCH_ROWS):
                count, x_at = min(FETCH_ROWS, rows - r), x + r * x_row + k * 4
                if n == 0 and left > 0:
                    for i in range(count):
                        fetch(x_at + i * x_row + CHUNK * 4, min(CHUNK, left) * 4)
                out = dst + r * dst_row + n * 4
                init, init_row = (bias + n * 4, 0) if k == 0 else (out, dst_row)
                steps = min(CHUNK, K - k)
                multiply_panel(x_at, x_row, count, w_at, width, init, init_row, out, dst_row, 1, 0, steps, chunk_floor)
            n += width


@linked(*(types.int64,) * 7)
def forward(model_ptr: int, block_ptr: int, data_ptr: int, begin: int, x: int, first: int, count: int) -> None:
    """The forward pass of rows first..first+count of the block at order[begin]; x is from rows_address."""
    model, block, data = model_at(model_ptr), block_at(block_ptr), data_at(data_ptr)
    table = model.table
    K0 = table[0, COL_K]
    if x == address(block.x):
        for r in range(first, first + count):
            row, copy = floats_at(data.x + data.order[begin + r] * K0 * 4, K0), block.x[r * K0 : (r + 1) * K0]
            for k in range(K0):
                copy[k] = row[k]
    src, src_row = x + first * K0 * 4, K0 * 4
    for layer in range(len(table)):
        N, code = table[layer, COL_N], table[layer, COL_CODE]
        width = padded_width(N)
        at = table[layer, COL_ACT] + first * width
        dst = address(block.acts) + at * 4
        w, bias = address(model.w) + table[layer, COL_W] * 4, address(model.bias) + table[layer, COL_BIAS] * 4
        floor = _ZERO if code == RELU else _NO_FLOOR
        if layer == 0:
            _first_layer(src, src_row, count, w, K0, width, bias, dst, width * 4, floor)
        else:
            dense(src, src_row, count, w, table[layer, COL_K], width, bias, dst, width * 4, floor)
        if code > RELU:
            activate(dst, count, N, width, code)
        src, src_row = dst, width * 4


@linked(*(types.int64,) * 7)
def output_gradients(
    model: int, block_ptr: int, data_ptr: int, begin: int, first: int, count: int, loss_code: int
) -> None:
    """Losses, correct predictions and output gradients of rows after `forward`."""
    table, block, data = table_at(model), block_at(block_ptr), data_at(data_ptr)
    last = len(table) - 1
    N = table[last, COL_N]
    width = padded_width(N)
    for r in range(first, first + count):
        at = table[last, COL_ACT] + r * width
        row = data.order[begin + r]
        block.losses[r], block.correct[r] = _loss_row(block.acts, block.dzs, at, N, width, loss_code, data, row)


@linked(*(types.int64,) * 4)
def backward(model_ptr: int, block_ptr: int, first: int, count: int) -> None:
    """Every layer's dz, from the output gradients of some rows."""
    model, block = model_at(model_ptr), block_at(block_ptr)
    table = model.table
    for layer in range(len(table) - 1, -1, -1):
        N = table[layer, COL_N]
        width = padded_width(N)
        at = table[layer, COL_ACT] + first * width
        if layer < len(table) - 1:
            next_width, K = padded_width(table[layer + 1, COL_N]), table[layer + 1, COL_N]
            src = address(block.dzs) + (table[layer + 1, COL_ACT] + first * next_width) * 4
            wt, dst = address(model.wt) + table[layer + 1, COL_WT] * 4, address(block.dzs) + at * 4
            dense(src, next_width * 4, count, wt, K, width, address(block.zeros), dst, width * 4, _NO_FLOOR)
        _through_activation(block.dzs, block.acts, at, count, N, width, table[layer, COL_CODE])
