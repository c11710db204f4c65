"""A scan (prefix sum, max, min or product) as data, shared by kernels and layers."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import numpy as np

from onchip.errors import InputError, ShapeError
from onchip.network.names import known_name

OPS = ("sum", "max", "min", "product")
DTYPES = ("int32", "int64", "float32", "float64")  # y has x's; ints wrap


@dataclass(frozen=True)
class ScanOp:
    """y[i] = x[0] op ... op x[i]; without x[i] if exclusive, from the end if reverse. Every op propagates NaN."""

    op: str = "sum"
    exclusive: bool = False
    reverse: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "op", known_name(self.op, OPS, "op of a scan", "sum"))

    def identity(self, dtype: str) -> Any:
        """The first value of an exclusive scan, in x's dtype."""
        kind = np.dtype(dtype)
        if self.op in ("sum", "product"):
            return kind.type(self.op == "product")
        if kind.kind == "f":
            return kind.type(-np.inf if self.op == "max" else np.inf)
        limits = np.iinfo(kind)
        return kind.type(limits.min if self.op == "max" else limits.max)

    def total_dtype(self, dtype: str) -> str:
        """The dtype of the carry between chunks of a row: a float32 carry would lose digits."""
        return "float64" if dtype == "float32" and self.op in ("sum", "product") else dtype


def check_dtype(dtype: Any) -> str:
    """The name of a dtype that can be scanned."""
    name = str(dtype)
    if name not in DTYPES:
        raise InputError("unsupported dtype", got=name, expected=", ".join(DTYPES), hint="x.astype('float32')")
    return name


def check_axis(axis: int, shape: tuple[int, ...]) -> int:
    """The axis as a non-negative index."""
    rank = len(shape)
    if not rank:
        raise ShapeError("a scalar has no axis to scan", expected="an array", hint="x.reshape(1)")
    try:
        found = operator.index(axis)
    except TypeError:
        found = rank
    if not -rank <= found < rank:
        raise ShapeError("no such axis", got=str(axis), expected=f"-{rank} to {rank - 1}", hint="axis=-1")
    return found % rank


def check_out(shape: tuple[int, ...], dtype: str, wanted: tuple[int, ...], wanted_dtype: str) -> None:
    if (tuple(shape), dtype) != (tuple(wanted), wanted_dtype):
        raise ShapeError("out does not fit", got=f"{dtype}{list(shape)}", expected=f"{wanted_dtype}{list(wanted)}")
