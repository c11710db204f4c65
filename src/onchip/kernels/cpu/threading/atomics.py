"""Sequentially consistent atomics on 64-bit words, by address, and blocking locks: Python's own (PyThread_*), which
exist on every system and need no GIL.
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
_ORDERING, _WORD_POINTER = "seq_cst", INT.as_pointer()


@intrinsic
def atomic_load(typing_context: Any, address: Any) -> Any:
    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.load_atomic(b.inttoptr(args[0], _WORD_POINTER), _ORDERING, 8)

    return types.int64(types.int64), codegen


@intrinsic
def atomic_exchange(typing_context: Any, address: Any, value: Any) -> Any:
    """Write a word; return its old value."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.atomic_rmw("xchg", b.inttoptr(args[0], _WORD_POINTER), args[1], _ORDERING)

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def atomic_add(typing_context: Any, address: Any, value: Any) -> Any:
    """Add to a word; return its old value."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.atomic_rmw("add", b.inttoptr(args[0], _WORD_POINTER), args[1], _ORDERING)

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def atomic_compare_exchange(typing_context: Any, address: Any, expected: Any, value: Any) -> Any:
    """Write a word if it is `expected`; return whether it was."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        result = b.cmpxchg(b.inttoptr(args[0], _WORD_POINTER), args[1], args[2], _ORDERING, _ORDERING)
        return b.extract_value(result, 1)

    return types.boolean(types.int64, types.int64, types.int64), codegen


@intrinsic
def pause(typing_context: Any) -> Any:
    """The CPU's spin-wait hint: some 40 ns on x86, a few on ARM."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        if IS_ARM:
            function_type = ir.FunctionType(ir.VoidType(), [INT32])
            b.call(cgutils.get_or_insert_function(b.module, function_type, "llvm.aarch64.hint"), [INT32(1)])
        else:
            function_type = ir.FunctionType(ir.VoidType(), [])
            b.call(cgutils.get_or_insert_function(b.module, function_type, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), codegen


_clock = getattr(ctypes.CDLL(None), "clock_gettime", None) if os.name == "posix" else None
if _clock is not None:
    llvm.add_symbol("clock_gettime", ctypes.cast(_clock, ctypes.c_void_p).value)


@intrinsic
def nanoseconds(typing_context: Any) -> Any:
    """The monotonic clock; 0 on systems without `clock_gettime`."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        if _clock is None:
            return INT(0)
        timespec = cgutils.alloca_once(b, ir.ArrayType(INT, 2))
        function_type = ir.FunctionType(INT32, [INT32, cgutils.voidptr_t])
        function = cgutils.get_or_insert_function(b.module, function_type, "clock_gettime")
        b.call(function, [INT32(time.CLOCK_MONOTONIC), b.bitcast(timespec, cgutils.voidptr_t)])
        seconds, nanos = (b.extract_value(b.load(timespec), i) for i in range(2))
        return b.add(b.mul(seconds, INT(10**9)), nanos)

    return types.int64(), codegen


# -- locks -------------------------------------------------------------------------------------------------

_python = ctypes.pythonapi
_python.PyThread_allocate_lock.restype = ctypes.c_void_p
_python.PyThread_acquire_lock.argtypes = [ctypes.c_void_p, ctypes.c_int]
for _name in ("PyThread_acquire_lock", "PyThread_release_lock"):
    llvm.add_symbol(_name, ctypes.cast(getattr(_python, _name), ctypes.c_void_p).value)


def acquired_lock() -> int:
    """A new lock, acquired: `acquire` blocks until another thread releases it."""
    lock = _python.PyThread_allocate_lock()
    _python.PyThread_acquire_lock(lock, 1)
    return int(lock)


@intrinsic
def acquire(typing_context: Any, lock: Any) -> Any:
    """Acquire a lock; block until it is free."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        function_type = ir.FunctionType(INT32, [cgutils.voidptr_t, INT32])
        function = cgutils.get_or_insert_function(b.module, function_type, "PyThread_acquire_lock")
        b.call(function, [b.inttoptr(args[0], cgutils.voidptr_t), INT32(1)])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def release(typing_context: Any, lock: Any) -> Any:
    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        function_type = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t])
        function = cgutils.get_or_insert_function(b.module, function_type, "PyThread_release_lock")
        b.call(function, [b.inttoptr(args[0], cgutils.voidptr_t)])
        return context.get_dummy_value()

    return types.void(types.int64), codegen
