"""torch functions that its ONNX exporter lacks, or supports only for some sizes, rewritten with supported ones."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from onchip.network.recipe import Array


@contextlib.contextmanager
def plain_functions(torch: Any) -> Iterator[None]:
    """A context in which these functions are replaced by their decompositions."""
    F = torch.nn.functional
    forms: list[tuple[Any, str, Callable[..., Any]]] = [(owner, "channel_shuffle", _shuffle) for owner in (F, torch)]
    forms += [(F, "pairwise_distance", _distance), (F, "bilinear", _bilinear), (torch, "diag_embed", _diagonal)]
    forms += [(owner, "cumprod", _running_product) for owner in (torch, torch.Tensor)]
    for rank in (1, 2, 3):
        forms += [(F, f"adaptive_avg_pool{rank}d", _adaptive(_mean_pool, rank))]
        forms += [(F, f"adaptive_max_pool{rank}d", _adaptive(_max_pool, rank))]
    originals = [getattr(owner, name) for owner, name, _ in forms]
    for (owner, name, replacement), function in zip(forms, originals, strict=True):
        setattr(owner, name, _called(torch, replacement, function))
    try:
        yield
    finally:
        for (owner, name, _), function in zip(forms, originals, strict=True):
            setattr(owner, name, function)


def _called(torch: Any, replacement: Callable[..., Any], function: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about row sizes, which are constants
            result = replacement(torch, *args, **kwargs)
        return function(*args, **kwargs) if result is None else result

    return call


def _shuffle(torch: Any, x: Any, groups: int) -> Any:
    B, C, *rest = x.shape
    return x.reshape(B, groups, C // groups, *rest).transpose(1, 2).reshape(B, C, *rest)


def _distance(torch: Any, a: Any, b: Any, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Any:
    return torch.linalg.vector_norm(a - b + eps, p, -1, keepdim)  # the exporter drops eps


def _bilinear(torch: Any, a: Any, b: Any, weight: Any, bias: Any = None) -> Any:
    """a (.., D_a) @ weight (D_out, D_a, D_b) is a gemm; its dot product with b (.., D_b) follows."""
    D_out, D_a, D_b = weight.shape
    by_first = (a @ weight.permute(1, 0, 2).reshape(D_a, D_out * D_b)).unflatten(-1, (D_out, D_b))
    y = (by_first * b.unsqueeze(-2)).sum(-1)
    return y if bias is None else y + bias


def _diagonal(torch: Any, x: Any, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
    if (offset, dim1, dim2) != (0, -2, -1):
        return None
    return x.unsqueeze(-1) * torch.eye(int(x.shape[-1]), dtype=x.dtype, device=x.device)


def _running_product(torch: Any, x: Any, dim: int, dtype: Any = None) -> Any:
    """Cumulative product by doubling: multiply by the elements 1, 2, 4, .. positions before."""
    x, n, step = x if dtype is None else x.to(dtype), int(x.shape[dim]), 1
    while step < n:
        ones = torch.ones_like(x.narrow(dim, 0, step))
        x, step = x * torch.cat([ones, x.narrow(dim, 0, n - step)], dim), 2 * step
    return x


def _adaptive(pool: Callable[..., Any], rank: int) -> Callable[..., Any]:
    """Adaptive pool of x (.., rank axes) to output_size cells per axis; None if the exporter supports it."""

    def replacement(torch: Any, x: Any, output_size: Any, return_indices: bool = False) -> Any:
        sizes = [int(n) for n in x.shape[-rank:]]
        requested = [output_size] * rank if isinstance(output_size, int) else list(output_size)
        cells = [n if out is None else int(out) for n, out in zip(sizes, requested, strict=True)]
        if return_indices or set(cells) == {1}:
            return None
        return pool(torch, x, sizes, cells)

    return replacement


def _mean_pool(torch: Any, x: Any, sizes: list[int], cells: list[int]) -> Any:
    if not any(n % out for n, out in zip(sizes, cells, strict=True)):
        windows = [n // out for n, out in zip(sizes, cells, strict=True)]
        return getattr(torch.nn.functional, f"avg_pool{len(sizes)}d")(x, windows, windows)
    # Cells of different sizes: one matrix of averaging weights over all positions.
    shares: Array = np.ones((1, 1))
    for n, out in zip(sizes, cells, strict=True):
        axis_shares = np.zeros((n, out))
        for cell, (first, end) in enumerate(_cells(n, out)):
            axis_shares[first:end, cell] = 1 / (end - first)
        shares = np.kron(shares, axis_shares)
    matrix = torch.tensor(shares, dtype=x.dtype, device=x.device)
    return (x.flatten(-len(sizes)) @ matrix).unflatten(-1, cells)


def _max_pool(torch: Any, x: Any, sizes: list[int], cells: list[int]) -> Any:
    if not any(n % out for n, out in zip(sizes, cells, strict=True)):
        windows = [n // out for n, out in zip(sizes, cells, strict=True)]
        return getattr(torch.nn.functional, f"max_pool{len(sizes)}d")(x, windows, windows)
    for axis, (n, out) in enumerate(zip(sizes, cells, strict=True), start=-len(sizes)):
        if out != n:
            maxima = [x.narrow(axis, a, b - a).amax(axis, keepdim=True) for a, b in _cells(n, out)]
            x = torch.cat(maxima, axis)
    return x


def _cells(n: int, out: int) -> list[tuple[int, int]]:
    """Start and end of each cell; neighbours overlap by one position if n is not divisible."""
    return [(cell * n // out, -(-(cell + 1) * n // out)) for cell in range(out)]
