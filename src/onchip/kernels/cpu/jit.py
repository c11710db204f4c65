"""How the CPU kernels are compiled: Numba, cached on disk, never stale.

Numba's own cache looks only at the file a function stands in, so an edit to a helper in another file goes
unseen. Here every kernel's cache folder is named by a digest of all sources of this package.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from onchip.errors import KernelError
from onchip.files import cache_dir

F = TypeVar("F", bound=Callable[..., Any])

# One parallel region at a time: Numba's fallback threading layer aborts the process when two Python threads
# enter it at once, and a kernel uses every core anyway.
LAUNCH = threading.Lock()


# GNU OpenMP's threads spin for many milliseconds at the end of a loop before they sleep. On a machine with other work
# the thread they wait for cannot run meanwhile: a training step of 0.7 ms then takes 15 to 24. Half a millisecond of
# spinning still bridges the gap between two calls. (A pause takes some 50 ns on x86, a few on ARM.)
_SPINS = "200000" if platform.machine().lower() in ("aarch64", "arm64") else "10000"


_launched_in: int | None = None  # the process in which the threads were started


def use_threads(count: int) -> None:
    """Let the parallel loops that follow run on `count` threads. Call it with LAUNCH held."""
    global _launched_in
    if _launched_in not in (None, os.getpid()):
        # GNU OpenMP would end the process without a word to catch.
        raise KernelError(
            "the CPU engine cannot go on in a forked process", got="a fork after the first run",
            expected="processes that start by themselves", hint="multiprocessing.get_context('spawn')",
        )  # fmt: skip
    _launched_in = os.getpid()
    if "GOMP_SPINCOUNT" in os.environ or "OMP_WAIT_POLICY" in os.environ:
        numba.set_num_threads(count)
        return
    os.environ["GOMP_SPINCOUNT"] = _SPINS  # read once, when Numba starts its threads in the first call below
    try:
        numba.set_num_threads(count)
    finally:
        del os.environ["GOMP_SPINCOUNT"]


@functools.cache
def _source_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def _cache_folder() -> str:
    """Where compiled kernels are kept; "" where nothing can be: then they are compiled each time.

    Left to itself Numba would keep them beside the source, under a key that does not know the other files.
    """
    folder = cache_dir() / "numba" / _source_digest()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return str(folder) if os.access(folder, os.W_OK) else ""
    except OSError:
        return ""


def compiled(*, parallel: bool = False, inline: bool = False) -> Callable[[F], F]:
    """Decorate a kernel: nopython, no GIL, IEEE arithmetic (no reordering, no contraction), cached on disk."""

    def decorate(function: F) -> F:
        before, folder = numba.config.CACHE_DIR, _cache_folder()
        numba.config.CACHE_DIR = folder or before
        try:
            # The folder is chosen while decorating; restoring the setting leaves the user's own kernels alone.
            return numba.njit(  # type: ignore[no-any-return]
                parallel=parallel,
                cache=bool(folder),
                nogil=True,
                error_model="numpy",
                inline="always" if inline else "never",
            )(function)
        finally:
            numba.config.CACHE_DIR = before

    return decorate


@compiled(inline=True)
def address(array: Any) -> int:
    """Where an array begins. Signed, as all address arithmetic here: Numba turns a mix of signs into floats."""
    return np.int64(array.ctypes.data)  # type: ignore[return-value]


@intrinsic  # type: ignore[untyped-decorator]
def take_ticket(typing_context: Any, counter: Any) -> Any:
    """The number at the address `counter`, which is one more for whoever comes next.

    Threads take pieces of work by tickets rather than by equal shares: on a machine that others use too, a thread
    may get half the time of its neighbour.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, ir.IntType(64)(1), "monotonic")

    return types.int64(types.int64), codegen


def _host_features() -> dict[str, bool]:
    return dict(llvm.get_host_cpu_features())


def _vector_shape() -> tuple[int, int, bool]:
    """Bytes of a vector register, how many there are, and whether it has fused multiply-add."""
    features = _host_features()
    if platform.machine().lower() in ("aarch64", "arm64"):
        return 16, 32, True
    if features.get("avx512f"):
        return 64, 32, True
    if features.get("avx2") or features.get("avx"):
        return 32, 16, bool(features.get("fma"))
    return 16, 16, False


VECTOR_BYTES, VECTOR_REGISTERS, HAS_FMA = _vector_shape()
