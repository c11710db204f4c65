"""Helpers that emit LLVM vector code, for the inner loops (tile.py, dot.py, gather.py).

In a Numba loop, accumulators are an array in memory; here they are SSA values, which LLVM keeps in registers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from onchip.kernels.cpu.compiler.late_numba import cgutils
from onchip.kernels.vectors import HAS_FMA, VECTOR_BYTES

LANES = VECTOR_BYTES // 4  # float32 elements per vector
INT, INT32, FLOAT = ir.IntType(64), ir.IntType(32), ir.FloatType()
VECTOR = ir.VectorType(FLOAT, LANES)
LANE_INDICES = ir.VectorType(INT32, LANES)


def zeros() -> Any:
    return ir.Constant(VECTOR, [0.0] * LANES)


def load(b: Any, address: Any, kind: Any, align: int = 4) -> Any:
    return b.load(b.inttoptr(address, kind.as_pointer()), align=align)


def masked_load(b: Any, address: Any, count: Any) -> Any:
    """A masked load: the first `count` elements of a vector, then zeros; memory after them is not read."""
    lanes = ir.Constant(ir.VectorType(INT, LANES), list(range(LANES)))
    mask = b.icmp_signed("<", lanes, splat(b, count))
    pointer = b.inttoptr(address, VECTOR.as_pointer())
    kind = ir.FunctionType(VECTOR, [pointer.type, INT32, mask.type, VECTOR])
    function = cgutils.get_or_insert_function(b.module, kind, f"llvm.masked.load.v{LANES}f32.p0")
    return b.call(function, [pointer, INT32(4), mask, zeros()])


def store(b: Any, value: Any, address: Any) -> None:
    b.store(value, b.inttoptr(address, value.type.as_pointer()), align=4)


def splat(b: Any, value: Any, lanes: int = LANES) -> Any:
    """A value in every lane."""
    undefined = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    one = b.insert_element(undefined, value, INT32(0))
    return b.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(INT32, lanes), [0] * lanes))


def splat_lane(b: Any, vector: Any, lane: int) -> Any:
    """One lane of a vector in every lane."""
    return b.shuffle_vector(vector, vector, ir.Constant(LANE_INDICES, [lane] * LANES))


def opaque(b: Any, value: Any) -> Any:
    """The same integer, hidden from LLVM's optimiser by an empty asm."""
    return b.asm(ir.FunctionType(INT, [INT]), "", "=r,0", [value], False)


def multiply_add(b: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z, as an FMA where the CPU has one."""
    if not HAS_FMA:
        return b.fadd(b.fmul(x, y), z)
    kind = ir.FunctionType(x.type, [x.type] * 3)
    return b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.fma.v{x.type.count}f32"), [x, y, z])


def loop(
    b: Any, start: Any, stop: Any, step: int, values: list[Any], body: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    """Emit `for i in range(start, stop, step): values = body(i, values)`; return the final values."""
    before = b.block
    inside, after = b.function.append_basic_block("inside"), b.function.append_basic_block("after")
    b.cbranch(b.icmp_signed("<", start, stop), inside, after)
    b.position_at_end(inside)
    i = b.phi(INT)
    i.add_incoming(start, before)
    phis = [b.phi(value.type) for value in values]
    for phi, value in zip(phis, values, strict=True):
        phi.add_incoming(value, before)
    leaving = body(i, list(phis))
    next_i, last = b.add(i, INT(step)), b.block  # the body may have added blocks
    i.add_incoming(next_i, last)
    for phi, value in zip(phis, leaving, strict=True):
        phi.add_incoming(value, last)
    b.cbranch(b.icmp_signed("<", next_i, stop), inside, after)
    b.position_at_end(after)
    done = [b.phi(value.type) for value in values]
    for phi, value, result in zip(done, values, leaving, strict=True):
        phi.add_incoming(value, before)
        phi.add_incoming(result, last)
    return done


def switch(b: Any, value: Any, cases: dict[int, Callable[[], None]]) -> None:
    """Emit a switch: runs the code of the matching case, if there is one."""
    after = b.function.append_basic_block("after")
    choice = b.switch(value, after)
    for case, body in cases.items():
        block = b.function.append_basic_block(f"case{case}")
        choice.add_case(INT(case), block)
        b.position_at_end(block)
        body()
        b.branch(after)
    b.position_at_end(after)
