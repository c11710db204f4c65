"""Functions of one number that are no activations: what networks compute distances, norms and positions with."""

from __future__ import annotations

from typing import ClassVar

from onchip.network.layers.base import Elementwise


class Abs(Elementwise):
    """|x|."""


class Sign(Elementwise):
    """1 above 0, -1 below, 0 of 0 and NaN of NaN."""


class Sqrt(Elementwise):
    """The square root; of a number below 0, NaN."""

    flop_each: ClassVar[int] = 8


class Reciprocal(Elementwise):
    """1 / x."""

    flop_each: ClassVar[int] = 8


class Exp(Elementwise):
    flop_each: ClassVar[int] = 16


class Log(Elementwise):
    """The natural logarithm; of a number below 0, NaN."""

    flop_each: ClassVar[int] = 20


class Sin(Elementwise):
    """Of x in radians."""

    flop_each: ClassVar[int] = 25


class Cos(Elementwise):
    """Of x in radians."""

    flop_each: ClassVar[int] = 25


class Atan(Elementwise):
    """The angle, in radians, whose tangent is x."""

    flop_each: ClassVar[int] = 25


class Erf(Elementwise):
    """2 / sqrt(pi) times the integral of exp(-t^2) from 0 to x."""

    flop_each: ClassVar[int] = 27


class Floor(Elementwise):
    """The largest whole number that is not above x."""


class Ceil(Elementwise):
    """The smallest whole number that is not below x."""


class Round(Elementwise):
    """The nearest whole number; of two the even one."""
