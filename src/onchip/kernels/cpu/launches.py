"""Several launches in one call into compiled code: a call on few rows takes as long as the Python around them."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from onchip.kernels.cpu.emit import INT
from onchip.kernels.cpu.jit import compiled, data_of, ints_at


@runtime_checkable
class CompiledLaunch(Protocol):
    """A launch that compiled code can make, too."""

    code: int  # address of a function of: its facts, a list of the addresses of its inputs and outputs, B, threads

    def facts(self, threads: int) -> tuple[int, object]:
        """The address of what the code wants to know, with scratch for one call at a time; and what keeps it."""
        ...


@intrinsic  # type: ignore[untyped-decorator]
def _call(typing_context: Any, code: Any, facts: Any, operands: Any, B: Any, threads: Any) -> Any:
    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        b.call(b.inttoptr(args[0], ir.FunctionType(ir.VoidType(), [INT] * 4).as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 5), codegen


@compiled()
def run_launches(plan: int, B: int, threads: int) -> None:
    """Launch after launch on B rows.

    plan  address of how many launches, operands and arrays there are, and of the addresses of
          the launches: each its code, its facts, its first operand
          the operands: each the number of its value
          the values: first the ids of the arrays, then of each value in between where it begins, in bytes a row
          the operands' addresses, overwritten
          memory for the values in between
    """
    words = ints_at(plan, 8)
    arrays, launches = words[2], ints_at(words[3], 3 * words[0])
    operands, values, places = ints_at(words[4], words[1]), ints_at(words[5], 1), ints_at(words[6], words[1])
    for i in range(words[1]):
        value = operands[i]
        places[i] = data_of(values[value]) if value < arrays else words[7] + values[value] * B
    for i in range(words[0]):
        _call(launches[3 * i], launches[3 * i + 1], words[6] + launches[3 * i + 2] * 8, B, threads)
