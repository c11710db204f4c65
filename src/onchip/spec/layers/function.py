"""Functions of one number that are no activations: what networks compute distances, norms and positions with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from onchip.spec.layers.base import Elementwise


@dataclass(frozen=True)
class Abs(Elementwise):
    """|x|."""


@dataclass(frozen=True)
class Sqrt(Elementwise):
    """The square root; of a number below 0, NaN."""

    flop_each: ClassVar[int] = 8


@dataclass(frozen=True)
class Reciprocal(Elementwise):
    """1 / x."""

    flop_each: ClassVar[int] = 8


@dataclass(frozen=True)
class Exp(Elementwise):
    flop_each: ClassVar[int] = 16


@dataclass(frozen=True)
class Log(Elementwise):
    """The natural logarithm; of a number below 0, NaN."""

    flop_each: ClassVar[int] = 20


@dataclass(frozen=True)
class Sin(Elementwise):
    """Of x in radians."""

    flop_each: ClassVar[int] = 25


@dataclass(frozen=True)
class Cos(Elementwise):
    """Of x in radians."""

    flop_each: ClassVar[int] = 25


@dataclass(frozen=True)
class Atan(Elementwise):
    """The angle, in radians, whose tangent is x."""

    flop_each: ClassVar[int] = 25


@dataclass(frozen=True)
class Erf(Elementwise):
    """2 / sqrt(pi) times the integral of exp(-t^2) from 0 to x."""

    flop_each: ClassVar[int] = 27


@dataclass(frozen=True)
class Floor(Elementwise):
    """The largest whole number that is not above x."""


@dataclass(frozen=True)
class Ceil(Elementwise):
    """The smallest whole number that is not below x."""


@dataclass(frozen=True)
class Round(Elementwise):
    """The nearest whole number; of two the even one."""
