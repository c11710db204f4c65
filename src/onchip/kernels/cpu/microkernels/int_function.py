"""Functions of two int64 for the expressions of layers: they replace those of the same name in function.py."""

from __future__ import annotations

from onchip.kernels.cpu.compiler.jit import compiled


@compiled(inline=True)
def quotient(a: int, b: int) -> int:
    """a / b truncated, b != 0; the lowest int by -1 wraps."""
    if b == -1:
        return -a
    down = a // b
    return down + 1 if down < 0 and down * b != a else down


@compiled(inline=True)
def truncated_remainder(a: int, b: int) -> int:
    return a - quotient(a, b) * b


@compiled(inline=True)
def remainder(a: int, b: int) -> int:
    rest = a - quotient(a, b) * b
    has_other_sign = rest != 0 and (rest < 0) != (b < 0)
    return rest + b if has_other_sign else rest
