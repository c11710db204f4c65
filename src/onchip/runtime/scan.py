"""scan: prefix sums, maxima, minima and products along an axis, on the CPU or a GPU."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from onchip.errors import InputError
from onchip.network.recipe import Array
from onchip.network.scan_op import ScanOp, check_axis, check_dtype, check_out
from onchip.runtime.cpu.backend import check_threads
from onchip.runtime.placement import find_device

if TYPE_CHECKING:
    from onchip.runtime.cuda.gpu import Gpu

_DLPACK_CPU = 1  # kDLCPU
PART = 1 << 24  # elements of a long row between two calls of `progress`


def scan(
    x: Any, op: str = "sum", exclusive: bool = False, axis: int = -1, device: str = "auto", out: Any = None
) -> Any:
    """y[i] = x[0] op x[1] op ... op x[i] along an axis.

    x          int32, int64, float32 or float64: NumPy, or an array on a GPU (torch, CuPy, JAX, ...), row-major
    op         sum, max, min, product
    exclusive  exclude x[i]: y begins with the identity of op (0, the least value, the largest value, 1)
    device     auto: where x is stored. "cuda" streams NumPy arrays of any size through a GPU
    out        same kind, shape and dtype as x, overwritten; may be x

    y has x's dtype; ints wrap, NaNs propagate. Bit-identical across runs, for any number of threads and rows.
    Float32 sums and products use float64 on the CPU, and carry float64 totals from tile to tile on a GPU: the error is
    at most that of pairwise summation, for any row length. Each tile is reduced before its prefix is applied. So a tile
    whose own total overflows may produce inf or NaN where a serial scan would not; on the CPU, such products are
    recomputed.
    """
    how = ScanOp(op, bool(exclusive))
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor) and not x.is_cuda:
        y = scan(_numpy_of(x), op, exclusive, axis, device, None if out is None else _numpy_of(out))
        return torch.from_numpy(y) if out is None else out
    if _is_on_gpu(x):
        return _scan_on_gpu(x, how, axis, device, out)
    if isinstance(x, np.ma.MaskedArray):
        raise InputError("cannot scan a masked array", hint="x.filled(0)")
    try:
        x = np.asarray(x)
    except ValueError as error:
        raise InputError("not an array", got=str(error), expected="rows of equal length") from None
    dtype, at = check_dtype(x.dtype), check_axis(axis, x.shape)
    if out is None:
        out = np.empty(x.shape, x.dtype)
    elif not isinstance(out, np.ndarray) or not out.flags.writeable:
        got = "a read-only array" if isinstance(out, np.ndarray) else type(out).__name__
        raise InputError("out cannot be written to", got=got, expected="a NumPy array, like x")
    else:
        check_out(out.shape, str(out.dtype), x.shape, dtype)
    scan_array(x, out, how, at, device)
    return out


def scan_into(
    x: Array,
    y: Array,
    how: ScanOp,
    device: str = "auto",
    threads: int | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> str:
    """Scan a flat x of any length into y, in host memory or memory-mapped; returns the device used.

    progress(elements done) is called after every PART elements. Bit-identical to one call over the whole row.
    """
    gpu, chosen = find_scan_device(device, threads)
    dtype = check_dtype(x.dtype)
    check_out(y.shape, str(y.dtype), x.shape, dtype)
    row: Callable[[Array, Array], None]
    if gpu is not None:
        from onchip.runtime.cuda.scan import row_scanner

        row, step = row_scanner(gpu, how, dtype, len(x), PART)
    else:
        from onchip.kernels.cpu.scan.scan import scan_rows

        count = check_threads(threads)
        totals = np.array([how.identity(how.total_dtype(dtype))])

        def scan_part(x: Array, y: Array) -> None:
            scan_rows(x.reshape(1, -1), y.reshape(1, -1), how, count, totals)

        row, step = scan_part, PART
    for start in range(0, len(x), step):
        part = slice(start, start + step)
        row(x[part], y[part])
        progress(min(len(x), start + step))
    return chosen


def _numpy_of(x: Any) -> Array:
    """The memory of a CPU torch tensor as a NumPy array."""
    if not hasattr(x, "layout") or x.device.type != "cpu" or str(x.layout) != "torch.strided":
        got = f"{x.layout} on {x.device}" if hasattr(x, "layout") else type(x).__name__
        raise InputError("not a dense CPU tensor", got=got, expected="torch.strided on cpu")
    check_dtype(str(x.dtype).removeprefix("torch."))
    array: Array = x.detach().resolve_neg().numpy()
    return array


def _is_on_gpu(x: Any) -> bool:
    if isinstance(x, np.ndarray):
        return False
    if hasattr(x, "__dlpack_device__"):
        return int(x.__dlpack_device__()[0]) != _DLPACK_CPU
    return hasattr(x, "__cuda_array_interface__")


def find_scan_device(device: str, threads: int | None = None) -> tuple[Gpu | None, str]:
    """The GPU that host arrays are streamed through, or None for the CPU, and its description.

    "auto" is the CPU: its memory is faster than the bus to any GPU.
    """
    if device in ("auto", "cpu"):
        count = check_threads(threads)
        why = " (auto: x is in host memory)" if device == "auto" else ""
        return None, f"cpu, {count} thread{'s' * (count > 1)}{why}"
    chosen = find_device(device, threads)[2]  # or raises DeviceError
    from onchip.runtime.cuda.gpu import Gpu

    return Gpu.get(int(chosen.partition(":")[2])), chosen


def scan_array(x: Array, y: Array, how: ScanOp, at: int, device: str = "auto", threads: int | None = None) -> str:
    """Scan x along axis `at` into y of the same shape and dtype in one call; returns the device used."""
    outer, N, inner = math.prod(x.shape[:at]), x.shape[at], math.prod(x.shape[at + 1 :])
    gpu, chosen = find_scan_device(device, threads)
    # Kernels read and write contiguous rows, each element once: x may be y, but must not partially overlap it.
    is_same = x.ctypes.data == y.ctypes.data and x.flags.c_contiguous
    is_direct = y.flags.c_contiguous and (is_same or not np.may_share_memory(x, y))
    target = y if is_direct else np.empty(y.shape, y.dtype)
    source = np.ascontiguousarray(x)
    if gpu is not None:
        from onchip.runtime.cuda.scan import scan_rows_through

        if inner == 1:
            scan_rows_through(gpu, source.reshape(outer, N), target.reshape(outer, N), how)
        else:
            rows = np.ascontiguousarray(np.moveaxis(source.reshape(outer, N, inner), 1, 2))
            scan_rows_through(gpu, rows.reshape(-1, N), rows.reshape(-1, N), how)
            target.reshape(outer, N, inner)[...] = np.moveaxis(rows, 2, 1)
    else:
        from onchip.kernels.cpu.scan.scan import scan_columns, scan_rows

        count = check_threads(threads)
        if inner == 1:
            scan_rows(source.reshape(outer, N), target.reshape(outer, N), how, count)
        else:
            scan_columns(source.reshape(outer, N, inner), target.reshape(outer, N, inner), how, count)
    if target is not y:
        y[...] = target
    return chosen


def _scan_on_gpu(x: Any, how: ScanOp, axis: int, device: str, out: Any) -> Any:
    from onchip.runtime.arrays.adapters import kind_of
    from onchip.runtime.cuda.gpu import Gpu
    from onchip.runtime.cuda.scan import scan_on_gpu

    if device == "cpu":
        raise InputError("x is on a GPU", got="device 'cpu'", expected="the GPU that x is on", hint="device='auto'")
    gpu = Gpu.get(_index_of(x)) if device == "auto" else find_scan_device(device)[0]
    assert gpu is not None
    kind = kind_of(x, gpu)
    assert kind is not None, type(x)
    return scan_on_gpu(x, kind, gpu, how, axis, out)


def _index_of(x: Any) -> int:
    """The index of the GPU that holds an array; from the pointer if it does not support DLPack."""
    if hasattr(x, "__dlpack_device__"):
        return int(x.__dlpack_device__()[1])
    from onchip.runtime.cuda.gpu import Gpu

    return max(0, Gpu.get().index_of(int(x.__cuda_array_interface__["data"][0] or 0)))
