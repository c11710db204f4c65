"""The shape of a GEMM, for any kernel."""

from __future__ import annotations

from dataclasses import dataclass

from onchip.network.layers import Elementwise


@dataclass(frozen=True)
class Gemm:
    """y (M, N) = activation(x (M, K) w^T + bias). Each kernel lays out w in its own way."""

    M: int
    N: int
    K: int
    precision: str  # a key of PRECISIONS
    dtypes: tuple[str, str] = ("float32", "float32")  # of x and y
    activation: Elementwise | None = None
