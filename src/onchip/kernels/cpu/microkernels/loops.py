"""The compiled loops of elementwise layers, around functions generated from their expressions (network/layers/).

An expression calls the functions of exponential.py and function.py (of int_function.py for ints), and abs, sqrt, floor,
ceil and rint. Or it names a loop of function.py, where one element at a time would be slow. Each loop is compiled
separately, when a network needs it.

Each loop counts from 0 over a slice of the row. LLVM vectorises only if it knows that the index is non-negative, since
Numba supports negative ones.
"""

from __future__ import annotations

import functools
import hashlib
from types import ModuleType
from typing import Any

import numpy as np

from onchip.errors import KernelError
from onchip.kernels.cpu.compiler.jit import CompiledFunction, LinkedFunction, compiled, floats_at, ints_at, linked
from onchip.kernels.cpu.compiler.late_numba import types
from onchip.kernels.cpu.microkernels import exponential, function, int_function
from onchip.kernels.pointwise import Operation, operation_of
from onchip.network.layers import Layer
from onchip.network.recipe import Array


def _functions(module: ModuleType) -> dict[str, Any]:
    return {name: each for name, each in vars(module).items() if isinstance(each, CompiledFunction | LinkedFunction)}


# What an expression may name, by the dtype of its elements.
_FLOAT_SCOPE = {
    **_functions(exponential), **_functions(function), "abs": abs, "sqrt": np.sqrt, "floor": np.floor, "ceil": np.ceil,
    "rint": np.rint, "Element": np.float32,
}  # fmt: skip
_SCOPES = {"float32": _FLOAT_SCOPE, "int64": {**_functions(int_function), "abs": abs, "Element": np.int64}}
_PAIRS: dict[tuple[np.float32, ...], Array] = {}  # parameters; kept alive, as loops receive their addresses


def parameters_word(layer: Layer) -> int:
    """The parameters of a layer for its loop, valid in this process: the bits of a float, or the address of two."""
    op = operation_of(layer)
    assert op is not None
    parameters = op.float32_parameters(layer)
    if len(parameters) < 2:
        return sum(int(value.view(np.uint32)) for value in parameters)
    address: int = _PAIRS.setdefault(parameters, np.array(parameters, np.float32)).ctypes.data
    return address


@compiled(inline=True)
def _parameters(word: int, count: int) -> tuple[np.float32, np.float32]:
    """The parameters of parameters_word; zeros for those that do not exist."""
    if count == 2:
        pair = floats_at(word, 2)
        return pair[0], pair[1]
    return np.int32(word).view(np.float32), np.float32(0)


@functools.cache
def in_place_loop(op: Operation) -> LinkedFunction:
    """y = f(y) for `count` rows of `width` floats, `stride` floats apart."""
    f, parameters = _function(op, "float32"), len(op.parameters)

    def rows(where: int, count: int, width: int, stride: int, word: int) -> None:
        p, q = _parameters(word, parameters)
        for r in range(count):
            row = floats_at(where + r * stride * 4, width)
            for n in range(width):
                row[n] = f(row[n], p, q)

    return _linked(rows, f)


def loop_of(layer: Layer, dtype: str = "float32") -> LinkedFunction:
    """y = f(x), or f(a, b), of `count` elements; may be in place."""
    op = operation_of(layer)
    assert op is not None
    return _loop(op, dtype)


@functools.cache
def _loop(op: Operation, dtype: str) -> LinkedFunction:
    written_out = _SCOPES[dtype].get(op.cpu)
    if isinstance(written_out, LinkedFunction):
        return written_out
    f, parameters, array_at = _function(op, dtype), len(op.parameters), floats_at if dtype == "float32" else ints_at

    def of_one(dst: int, src: int, _: int, count: int, word: int) -> None:
        y, x = floats_at(dst, count), floats_at(src, count)
        p, q = _parameters(word, parameters)
        for n in range(count):
            y[n] = f(x[n], p, q)

    def of_two(dst: int, first: int, second: int, count: int, word: int) -> None:
        y, a, b = array_at(dst, count), array_at(first, count), array_at(second, count)
        p, q = _parameters(word, parameters)
        for n in range(count):
            y[n] = f(a[n], b[n], p, q)

    return _linked(of_one if len(op.operands) == 1 else of_two, f)


def _linked(loop: Any, f: Any) -> LinkedFunction:
    loop.__name__ += f"_{f.__name__}"  # its symbol
    found: LinkedFunction = linked(*(types.int64,) * 5)(loop)
    return found


def _function(op: Operation, dtype: str) -> Any:
    """The expression as an inlined function of the operands and two parameters."""
    scope, unused = {**_SCOPES[dtype], "__name__": __name__}, ("_first", "_second")[len(op.parameters) :]
    arguments = ", ".join((*op.operands, *op.parameters, *unused))
    unknown = set(compile(op.cpu, "", "eval").co_names) - {*scope, *op.operands, *op.parameters}
    if unknown:
        got, expected = ", ".join(sorted(unknown)), ", ".join(_FLOAT_SCOPE)
        raise KernelError(f"{op.layer.__name__}: its expression `cpu` has unknown names", got=got, expected=expected)
    # Compiled code is cached under a key with the names of what it calls: these tell expressions apart.
    digest = hashlib.sha256(f"{dtype} {arguments} {op.cpu}".encode()).hexdigest()
    name = f"{op.layer.__name__}_{digest[:16]}"
    exec(compile(f"def {name}({arguments}): return {op.cpu}", __file__, "exec"), scope)
    return compiled(inline=True)(scope[name])
