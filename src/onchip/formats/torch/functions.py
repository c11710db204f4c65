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
    forms: list[tuple[Any, str, Callable[..., Any]]] = [(place, "channel_shuffle", _shuffle) for place in (F, torch)]
    forms += [(F, "pairwise_distance", _distance), (F, "bilinear", _bilinear), (torch, "diag_embed", _diagonal)]
    forms += [(place, "cumprod", _running_product) for place in (torch, torch.Tensor)]
    for rank in (1, 2, 3):
        forms += [(F, f"adaptive_avg_pool{rank}d", _adaptive(_mean_pool, rank))]
        forms += [(F, f"adaptive_max_pool{rank}d", _adaptive(_max_pool, rank))]
    own = [getattr(place, name) for place, name, _ in forms]
    for (place, name, form), function in zip(forms, own, strict=True):
        setattr(place, name, _called(torch, form, function))
    try:
        yield
    finally:
        for (place, name, _), function in zip(forms, own, strict=True):
            setattr(place, name, function)


def _called(torch: Any, form: Callable[..., Any], function: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the sizes of a row, which are constants
            made = form(torch, *args, **kwargs)
        return function(*args, **kwargs) if made is None else made

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
        front = torch.ones_like(x.narrow(dim, 0, step))
        x, step = x * torch.cat([front, x.narrow(dim, 0, n - step)], dim), 2 * step
    return x


def _adaptive(pool: Callable[..., Any], rank: int) -> Callable[..., Any]:
    """Adaptive pool of x (.., rank axes) to so many cells per axis; None if the exporter has an operator for it."""

    def form(torch: Any, x: Any, output_size: Any, return_indices: bool = False) -> Any:
        sizes = [int(n) for n in x.shape[-rank:]]
        given = [output_size] * rank if isinstance(output_size, int) else list(output_size)
        cells = [n if out is None else int(out) for n, out in zip(sizes, given, strict=True)]
        if return_indices or set(cells) == {1}:
            return None
        return pool(torch, x, sizes, cells)

    return form


def _mean_pool(torch: Any, x: Any, sizes: list[int], cells: list[int]) -> Any:
    if not any(n % out for n, out in zip(sizes, cells, strict=True)):
        windows = [n // out for n, out in zip(sizes, cells, strict=True)]
        return getattr(torch.nn.functional, f"avg_pool{len(sizes)}d")(x, windows, windows)
    # Cells of different sizes: one matrix of averaging weights over all positions.
    shares: Array = np.ones((1, 1))
    for n, out in zip(sizes, cells, strict=True):
        along = np.zeros((n, out))
        for cell, (first, end) in enumerate(_cells(n, out)):
            along[first:end, cell] = 1 / (end - first)
        shares = np.kron(shares, along)
    matrix = torch.tensor(shares, dtype=x.dtype, device=x.device)
    return (x.flatten(-len(sizes)) @ matrix).unflatten(-1, cells)


def _max_pool(torch: Any, x: Any, sizes: list[int], cells: list[int]) -> Any:
    if not any(n % out for n, out in zip(sizes, cells, strict=True)):
        windows = [n // out for n, out in zip(sizes, cells, strict=True)]
        return getattr(torch.nn.functional, f"max_pool{len(sizes)}d")(x, windows, windows)
    for axis, (n, out) in enumerate(zip(sizes, cells, strict=True), start=-len(sizes)):
        if out != n:
            parts = [x.narrow(axis, a, b - a).amax(axis, keepdim=True) for a, b in _cells(n, out)]
            x = torch.cat(parts, axis)
    return x


def _cells(n: int, out: int) -> list[tuple[int, int]]:
    """Start and end of each cell; neighbours overlap by one position if n is not divisible."""
    return [(cell * n // out, -(-(cell + 1) * n // out)) for cell in range(out)]
