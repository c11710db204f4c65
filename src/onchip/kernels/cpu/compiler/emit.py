"""LLVM vector code in words: what the inner loops (tile.py, dot.py, gather.py) are written with.

They are LLVM code because the accumulators of a Numba loop live in an array, that is in memory; here they are values,
and LLVM keeps them in registers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from onchip.kernels.cpu.compiler.late_numba import cgutils
from onchip.kernels.vectors import HAS_FMA, VECTOR_BYTES

LANES = VECTOR_BYTES // 4  # float32 numbers in a vector
INT, INT32, FLOAT = ir.IntType(64), ir.IntType(32), ir.FloatType()
VECTOR = ir.VectorType(FLOAT, LANES)
LANE_NUMBERS = ir.VectorType(INT32, LANES)


def zeros() -> Any:
    return ir.Constant(VECTOR, [0.0] * LANES)


def load(b: Any, address: Any, kind: Any, align: int = 4) -> Any:
    return b.load(b.inttoptr(address, kind.as_pointer()), align=align)


def load_some(b: Any, address: Any, count: Any) -> Any:
    """The first `count` numbers of a vector, zeros behind them; what lies behind them in memory is not touched."""
    lanes = ir.Constant(ir.VectorType(INT, LANES), list(range(LANES)))
    wanted = b.icmp_signed("<", lanes, splat(b, count))
    pointer = b.inttoptr(address, VECTOR.as_pointer())
    kind = ir.FunctionType(VECTOR, [pointer.type, INT32, wanted.type, VECTOR])
    function = cgutils.get_or_insert_function(b.module, kind, f"llvm.masked.load.v{LANES}f32.p0")
    return b.call(function, [pointer, INT32(4), wanted, zeros()])


def store(b: Any, value: Any, address: Any) -> None:
    b.store(value, b.inttoptr(address, value.type.as_pointer()), align=4)


def splat(b: Any, number: Any, lanes: int = LANES) -> Any:
    """A number in every lane."""
    undefined = ir.Constant(ir.VectorType(number.type, lanes), ir.Undefined)
    one = b.insert_element(undefined, number, INT32(0))
    return b.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(INT32, lanes), [0] * lanes))


def splat_lane(b: Any, vector: Any, lane: int) -> Any:
    """One number of a vector in every lane."""
    return b.shuffle_vector(vector, vector, ir.Constant(LANE_NUMBERS, [lane] * LANES))


def opaque(b: Any, number: Any) -> Any:
    """The same integer, in a register; LLVM does not know how it came about."""
    return b.asm(ir.FunctionType(INT, [INT]), "", "=r,0", [number], False)


def multiply_add(b: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z, rounded once where the machine can."""
    if not HAS_FMA:
        return b.fadd(b.fmul(x, y), z)
    kind = ir.FunctionType(x.type, [x.type] * 3)
    return b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.fma.v{x.type.count}f32"), [x, y, z])


def loop(
    b: Any, start: Any, stop: Any, step: int, values: list[Any], body: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    """for i in range(start, stop, step): values = body(i, values); the values after it. They stay in registers."""
    before = b.block
    inside, after = b.function.append_basic_block("inside"), b.function.append_basic_block("after")
    b.cbranch(b.icmp_signed("<", start, stop), inside, after)
    b.position_at_end(inside)
    i = b.phi(INT)
    i.add_incoming(start, before)
    entering = [b.phi(value.type) for value in values]
    for phi, value in zip(entering, values, strict=True):
        phi.add_incoming(value, before)
    leaving = body(i, list(entering))
    following, last = b.add(i, INT(step)), b.block  # the body may have made blocks of its own
    i.add_incoming(following, last)
    for phi, value in zip(entering, leaving, strict=True):
        phi.add_incoming(value, last)
    b.cbranch(b.icmp_signed("<", following, stop), inside, after)
    b.position_at_end(after)
    done = [b.phi(value.type) for value in values]
    for phi, value, made in zip(done, values, leaving, strict=True):
        phi.add_incoming(value, before)
        phi.add_incoming(made, last)
    return done


def switch(b: Any, value: Any, cases: dict[int, Callable[[], None]]) -> None:
    """Run the code of one case, or none."""
    after = b.function.append_basic_block("after")
    choice = b.switch(value, after)
    for number, body in cases.items():
        block = b.function.append_basic_block(f"case{number}")
        choice.add_case(INT(number), block)
        b.position_at_end(block)
        body()
        b.branch(after)
    b.position_at_end(after)
