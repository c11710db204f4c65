"""Elementwise functions other than activations: used for distances, norms and positions."""

from __future__ import annotations

from typing import ClassVar

from onchip.network.layers.base import Elementwise


class Abs(Elementwise):
    """|x|."""


class Sign(Elementwise):
    """1 for x > 0, -1 for x < 0, 0 for 0 and NaN for NaN."""


class Sqrt(Elementwise):
    """The square root; NaN for x < 0."""

    flop_each: ClassVar[int] = 8


class Reciprocal(Elementwise):
    """1 / x."""

    flop_each: ClassVar[int] = 8


class Exp(Elementwise):
    flop_each: ClassVar[int] = 16


class Log(Elementwise):
    """The natural logarithm; NaN for x < 0."""

    flop_each: ClassVar[int] = 20


class Sin(Elementwise):
    """x in radians."""

    flop_each: ClassVar[int] = 25


class Cos(Elementwise):
    """x in radians."""

    flop_each: ClassVar[int] = 25


class Atan(Elementwise):
    """The arc tangent, in radians."""

    flop_each: ClassVar[int] = 25


class Erf(Elementwise):
    """2 / sqrt(pi) times the integral of exp(-t^2) from 0 to x."""

    flop_each: ClassVar[int] = 27


class Floor(Elementwise):
    """The largest integer <= x."""


class Ceil(Elementwise):
    """The smallest integer >= x."""


class Round(Elementwise):
    """The nearest integer; ties to even."""
