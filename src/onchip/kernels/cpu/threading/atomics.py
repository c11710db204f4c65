"""Words of memory that several threads change, 64-bit and by address, every step in one order that all threads see; and
locks to sleep on: Python's own, which every system has and which need no GIL.
"""

from __future__ import annotations

import ctypes
import os
import platform
import time
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from onchip.kernels.cpu.compiler.emit import INT, INT32
from onchip.kernels.cpu.compiler.late_numba import cgutils, intrinsic, types

IS_ARM = platform.machine().lower() in ("aarch64", "arm64")
_ORDER, _WORD = "seq_cst", INT.as_pointer()


@intrinsic
def atomic_load(typing_context: Any, where: Any) -> Any:
    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.load_atomic(b.inttoptr(args[0], _WORD), _ORDER, 8)

    return types.int64(types.int64), codegen


@intrinsic
def atomic_exchange(typing_context: Any, where: Any, value: Any) -> Any:
    """Write a word; what stood there before."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.atomic_rmw("xchg", b.inttoptr(args[0], _WORD), args[1], _ORDER)

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def atomic_add(typing_context: Any, where: Any, value: Any) -> Any:
    """Add to a word; what stood there before."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.atomic_rmw("add", b.inttoptr(args[0], _WORD), args[1], _ORDER)

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def atomic_replace(typing_context: Any, where: Any, expected: Any, value: Any) -> Any:
    """Write a word if it is still what was expected; whether it was."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        done = b.cmpxchg(b.inttoptr(args[0], _WORD), args[1], args[2], _ORDER, _ORDER)
        return b.extract_value(done, 1)

    return types.boolean(types.int64, types.int64, types.int64), codegen


@intrinsic
def pause(typing_context: Any) -> Any:
    """Tell the core that this thread looks at a word again and again: some 40 ns on x86, a few on ARM."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        if IS_ARM:
            kind = ir.FunctionType(ir.VoidType(), [INT32])
            b.call(cgutils.get_or_insert_function(b.module, kind, "llvm.aarch64.hint"), [INT32(1)])
        else:
            kind = ir.FunctionType(ir.VoidType(), [])
            b.call(cgutils.get_or_insert_function(b.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), codegen


_clock = getattr(ctypes.CDLL(None), "clock_gettime", None) if os.name == "posix" else None
if _clock is not None:
    llvm.add_symbol("clock_gettime", ctypes.cast(_clock, ctypes.c_void_p).value)


@intrinsic
def nanoseconds(typing_context: Any) -> Any:
    """Of a clock that only goes forward; 0 where the system has no such clock by this name."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        if _clock is None:
            return INT(0)
        made = cgutils.alloca_once(b, ir.ArrayType(INT, 2))
        kind = ir.FunctionType(INT32, [INT32, cgutils.voidptr_t])
        function = cgutils.get_or_insert_function(b.module, kind, "clock_gettime")
        b.call(function, [INT32(time.CLOCK_MONOTONIC), b.bitcast(made, cgutils.voidptr_t)])
        seconds, rest = (b.extract_value(b.load(made), i) for i in range(2))
        return b.add(b.mul(seconds, INT(10**9)), rest)

    return types.int64(), codegen


# -- locks -------------------------------------------------------------------------------------------------

_python = ctypes.pythonapi
_python.PyThread_allocate_lock.restype = ctypes.c_void_p
_python.PyThread_acquire_lock.argtypes = [ctypes.c_void_p, ctypes.c_int]
for _name in ("PyThread_acquire_lock", "PyThread_release_lock"):
    llvm.add_symbol(_name, ctypes.cast(getattr(_python, _name), ctypes.c_void_p).value)


def held_lock() -> int:
    """A new lock; who takes it sleeps until another thread has released it."""
    lock = _python.PyThread_allocate_lock()
    _python.PyThread_acquire_lock(lock, 1)
    return int(lock)


@intrinsic
def sleep_on(typing_context: Any, lock: Any) -> Any:
    """Take a lock, and sleep until that can be done."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(INT32, [cgutils.voidptr_t, INT32])
        function = cgutils.get_or_insert_function(b.module, kind, "PyThread_acquire_lock")
        b.call(function, [b.inttoptr(args[0], cgutils.voidptr_t), INT32(1)])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def release(typing_context: Any, lock: Any) -> Any:
    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t])
        function = cgutils.get_or_insert_function(b.module, kind, "PyThread_release_lock")
        b.call(function, [b.inttoptr(args[0], cgutils.voidptr_t)])
        return context.get_dummy_value()

    return types.void(types.int64), codegen
