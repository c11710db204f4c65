"""Activations and softmax on rows in cache."""

from __future__ import annotations

import math
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir

from onchip.errors import KernelError
from onchip.kernels.cpu.compiler.jit import address_of, code_call, compiled, floats_at, int_at, linked
from onchip.kernels.cpu.compiler.late_numba import cgutils, intrinsic, types
from onchip.kernels.cpu.microkernels.exponential import expm1_exp
from onchip.kernels.cpu.microkernels.loops import in_place_loop, parameters_word
from onchip.kernels.pointwise import CODES, IDENTITY, RELU, operation_of
from onchip.network.layers import Elementwise

NO_NORMALISER, SOFTMAX, LOG_SOFTMAX = 0, 1, 2
NORMALISERS = {"": NO_NORMALISER, "Softmax": SOFTMAX, "LogSoftmax": LOG_SOFTMAX}

# The lower 8 bits of an activation's code are its kind: of CODES, or of a user's layer, as they come.
_kinds = dict(CODES)
_MOST_KINDS = 256
_ZERO = np.float32(0)
_CHUNK = 64  # exponentials per chunk of log-softmax
_ADDRESSES = np.zeros(_MOST_KINDS, np.int64)  # of the loops, by kind
llvm.add_symbol("onchip_activations", _ADDRESSES.ctypes.data)


def code_of(layer: Elementwise | None) -> int:
    """The code of an activation for `activate`, valid in this process. Compiles or loads the activation's loop."""
    if layer is None:
        return IDENTITY
    op = operation_of(layer)
    assert op is not None
    kind = _kinds.setdefault(op, 1 + len(_kinds))
    if kind >= _MOST_KINDS:
        raise KernelError("too many activations", got=f"{kind}, with {layer.kind}", expected=f"below {_MOST_KINDS}")
    if kind != RELU and not _ADDRESSES[kind]:
        _ADDRESSES[kind] = address_of(in_place_loop(op))
    return kind | parameters_word(layer) << 8


@intrinsic
def _addresses(typing_context: Any) -> Any:
    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        symbol = ir.FunctionType(ir.VoidType(), [])  # declared as a function: resolves at any address
        return b.ptrtoint(cgutils.get_or_insert_function(b.module, symbol, "onchip_activations"), ir.IntType(64))

    return types.int64(), codegen


_call_loop = code_call(5)  # where, count, width, stride, parameters


@linked(*(types.int64,) * 5)
def activate(where: int, count: int, width: int, stride: int, code: int) -> None:
    """Apply an activation (code_of) in place to `count` rows of `width` elements, `stride` elements apart."""
    kind = code & 255
    if kind == RELU:  # most networks have it, and no other loop then
        for r in range(count):
            row = floats_at(where + r * stride * 4, width)
            for n in range(width):
                row[n] = _ZERO if row[n] < _ZERO else row[n]
    elif kind != IDENTITY:
        _call_loop(int_at(_addresses() + kind * 8), where, count, width, stride, code >> 8)


@intrinsic
def _stack_floats(typing_context: Any) -> Any:
    """The address of _CHUNK floats on the stack."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        buffer = cgutils.alloca_once(b, ir.ArrayType(ir.FloatType(), _CHUNK))
        return b.ptrtoint(buffer, ir.IntType(64))

    return types.int64(), codegen


@compiled(inline=True)
def _larger(a: np.float32, b: np.float32) -> np.float32:
    """A NaN is larger than anything."""
    return b if b > a or b != b else a


@compiled()
def _largest(where: int, width: int) -> np.float32:
    """The maximum of a row, in four independent chains."""
    row, whole = floats_at(where, width), width // 4
    a, b, c, d = row[0], row[0], row[0], row[0]
    for n in range(whole):
        a, b = _larger(a, row[4 * n]), _larger(b, row[4 * n + 1])
        c, d = _larger(c, row[4 * n + 2]), _larger(d, row[4 * n + 3])
    for n in range(4 * whole, width):
        a = _larger(a, row[n])
    return _larger(_larger(a, b), _larger(c, d))


@linked(*(types.int64,) * 5)
def normalise(where: int, count: int, width: int, stride: int, code: int) -> None:
    """Softmax or log-softmax of rows as in `activate`, in place; sums run in order."""
    exps_at = _stack_floats()
    exps = floats_at(exps_at, _CHUNK)
    for r in range(count):
        row = floats_at(where + r * stride * 4, width)
        highest = _largest(where + r * stride * 4, width)
        total = 0.0  # float64: a float32 sum over a very wide row would lose digits
        if code == SOFTMAX:  # the sum is a separate loop, so that the exponentials vectorise
            for n in range(width):
                _, e = expm1_exp(row[n] - highest)
                row[n] = e
            for n in range(width):
                total += np.float64(row[n])
            scale = np.float32(total)
            for n in range(width):
                row[n] = row[n] / scale
        else:
            for first in range(0, width, _CHUNK):  # in chunks, so that the exponentials vectorise
                chunk = floats_at(where + (r * stride + first) * 4, min(_CHUNK, width - first))
                for n in range(len(chunk)):
                    chunk[n] -= highest
                for n in range(len(chunk)):
                    _, exps[n] = expm1_exp(chunk[n])
                for n in range(len(chunk)):
                    total += np.float64(exps[n])
            log_total = np.float32(math.log(total))
            for n in range(width):
                row[n] = row[n] - log_total
