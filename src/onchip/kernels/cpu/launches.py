"""Launches, and several of them in one call into compiled code: with few rows, what takes long is the Python around."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from onchip.kernels.cpu.emit import INT
from onchip.kernels.cpu.jit import address, compiled, data_of, ints_at
from onchip.kernels.cpu.threads import Spare
from onchip.spec.recipe import Array

Launch = Callable[[Sequence[Array], Sequence[Array], int], None]  # (inputs, outputs, threads)


class CompiledLaunch:
    """A launch of one input and one output that compiled code can make, too."""

    def __init__(self, code: int, facts: Callable[[int], tuple[int, object]]) -> None:
        """
        code   address of a linked function of: its facts, the addresses of x and y as a list, B, threads
        facts  of a number of threads: the address of what the code wants to know, with scratch for one call at a time,
               and what is kept as long as that
        """
        self.code, self.facts = code, facts
        self._spare = Spare(facts)

    def __call__(self, inputs: Sequence[Array], outputs: Sequence[Array], threads: int) -> None:
        x, y = inputs[0], outputs[0]
        facts = self._spare.take(threads)
        _launch(self.code, facts[0], id(x), id(y), len(y), threads)
        self._spare.give_back(facts)


@intrinsic  # type: ignore[untyped-decorator]
def _call(typing_context: Any, code: Any, facts: Any, operands: Any, B: Any, threads: Any) -> Any:
    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        b.call(b.inttoptr(args[0], ir.FunctionType(ir.VoidType(), [INT] * 4).as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 5), codegen


@compiled()
def _launch(code: int, facts: int, x: int, y: int, B: int, threads: int) -> None:
    """x, y: as data_of reads them"""
    operands = np.empty(2, np.int64)
    operands[0], operands[1] = data_of(x), data_of(y)
    _call(code, facts, address(operands), B, threads)


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
