"""Kernels along one axis of an array (outer, N, inner): a warp per row if inner is 1, else a thread per column."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from onchip.kernels.cuda.common.arguments import Argument, Input, Int64, Output
from onchip.kernels.cuda.common.program import Budget, KernelLaunch, Program, Steps, grid_1d
from onchip.network.types import TensorType

THREADS, BLOCKS_PER_SM = 256, 32


@dataclass(frozen=True)
class Axis:
    """A batch row as (outer, N, inner), of which N is the axis."""

    outer: int
    N: int
    inner: int

    @classmethod
    def of(cls, x: TensorType, axis: int) -> Axis:
        """axis: of the whole array, batch first; may be negative"""
        at = axis % len(x.shape) - 1
        return cls(math.prod(x.row_shape[:at]), x.row_shape[at], math.prod(x.row_shape[at + 1 :]))

    def steps(
        self, B: int, units: int, source: Path, name: str, template: str, budget: Budget, *sizes: int, inputs: int = 1
    ) -> Steps:
        """{name}_rows(inputs..., y, outer, N, sizes...) or {name}_columns(inputs..., y, outer, N, inner, sizes...)"""
        outer, is_row = B * self.outer, self.inner == 1
        if not outer * self.inner:
            return Steps(())
        program = Program(source, f"{name}_{'rows' if is_row else 'columns'}<{template}>")
        threads = outer * (32 if is_row else self.inner)
        config = grid_1d(min(-(-threads // THREADS), units * BLOCKS_PER_SM))
        shape = (outer, self.N) if is_row else (outer, self.N, self.inner)
        arguments: tuple[Argument, ...] = (*map(Input, range(inputs)), Output(0), *map(Int64, (*shape, *sizes)))
        return Steps((KernelLaunch(program, config, arguments, budget),))
