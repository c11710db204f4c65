"""Compiled functions as machine code: cached as object files, loaded by LLVM without Numba, called as built-ins.

Idea    A warm start needs only a function's address. Numba's own cache restores types, bitcode and dispatchers, for
        which all of Numba is loaded; here an entry is an object file and the symbols it needs.
Calls   Python calls a function of ints as a built-in: LLVM code unboxes the ints and releases the GIL. Such a call
        takes a third of the time of a ctypes call.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm

from onchip.cache import read_entry, write_entry

_METH_FASTCALL = 0x80
_PYTHON = ("PyLong_AsLongLong", "PyLong_FromLongLong", "PyEval_SaveThread", "PyEval_RestoreThread")


# Settings of Numba that change no machine code. joblib sets the first in its workers: with it in the key, each kernel
# would be compiled for them again.
_NOT_CODE = ("NUMBA_NUM_THREADS", "NUMBA_THREADING_LAYER", "NUMBA_THREADING_LAYER_PRIORITY", "NUMBA_CACHE_DIR")


@functools.cache
def versions() -> tuple[Any, ...]:
    """What machine code depends on besides its source: compilers, their settings, the CPU."""
    found = importlib.util.find_spec("numba")
    assert found is not None
    assert found.origin is not None
    numba = hashlib.sha256((Path(found.origin).parent / "_version.py").read_bytes()).hexdigest()
    settings = sorted(
        (name, value) for name, value in os.environ.items() if name.startswith("NUMBA_") and name not in _NOT_CODE
    )
    cpu = llvm.get_process_triple(), llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    return numba, llvmlite.__version__, sys.version, settings, cpu


_loading = threading.Lock()
_loaded: dict[str, tuple[int, Any]] = {}  # key -> address, and the engine that owns the code


def _target_machine() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    return target.create_target_machine(cpu=llvm.get_host_cpu_name(), opt=2, reloc="default", codemodel="jitdefault")


def _load(key: str, name: str, code: bytes) -> int:
    """Each object has its own engine: Numba numbers symbols per process, so two objects may define the same one."""
    with _loading:
        if key not in _loaded:
            engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine())
            engine.add_object_file(llvm.ObjectFileRef.from_data(code))
            engine.finalize_object()
            _loaded[key] = int(engine.get_function_address(name)), engine
        return _loaded[key][0]


def load_code(folder: Path | None, key: str, find: Callable[[Sequence[str]], bool]) -> int | None:
    """The address of the code cached under a key; None if it is not cached, or a symbol it needs is missing.

    find  resolves the symbols that the code needs; False if one is missing
    """
    entry = read_entry(folder, key)
    if entry is None:
        return None
    head, _, code = entry.partition(b"\n")
    name, *needs = json.loads(head)
    return _load(key, name, code) if find(needs) else None


def store_code(folder: Path | None, key: str, name: str, needs: Sequence[str], code: bytes) -> None:
    write_entry(folder, key, json.dumps([name, *needs]).encode() + b"\n" + code)


# -- calls from Python -----------------------------------------------------------------------------------------


class _Method(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p), ("function", ctypes.c_void_p), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p)
    )  # fmt: skip


_methods: list[Any] = []  # keeps them alive: Python has pointers to them


def python_function(name: str, address: int, count: int, folder: Path | None) -> Callable[..., int]:
    """A built-in function that calls the code at `address`: `count` int64 arguments, an int64 result."""
    method = _Method(name.encode(), _caller(count, folder), _METH_FASTCALL, None)
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p]
    _methods.append(method)
    return make(ctypes.addressof(method), address, None)  # type: ignore[no-any-return]


@functools.cache
def _caller(count: int, folder: Path | None) -> int:
    """The built-in's C function: it calls the code at the address in `self`, with `count` int64 arguments."""
    for name in _PYTHON:
        llvm.add_symbol(name, ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value)
    source, name = Path(__file__).read_bytes(), f"onchip_call_{count}"
    key = hashlib.sha256(repr((source, versions(), name)).encode()).hexdigest()
    found = load_code(folder, key, lambda needs: True)
    if found is None:
        code = _target_machine().emit_object(llvm.parse_assembly(_caller_source(name, count)))
        store_code(folder, key, name, [], code)
        found = _load(key, name, code)
    return found


def _caller_source(name: str, count: int) -> str:
    """LLVM IR of _caller. All pointers are ints, so that it is the same for every version of LLVM."""
    from llvmlite import ir

    int64 = ir.IntType(64)
    module = ir.Module()
    as_int, as_object, save_thread, restore_thread = (
        ir.Function(module, ir.FunctionType(int64 if has_result else ir.VoidType(), [int64] * arity), symbol)
        for symbol, arity, has_result in zip(_PYTHON, (1, 1, 0, 1), (True, True, True, False), strict=True)
    )
    function = ir.Function(module, ir.FunctionType(int64, [int64] * 3), name)
    b = ir.IRBuilder(function.append_basic_block())
    this, arguments, _ = function.args
    objects = b.inttoptr(arguments, int64.as_pointer())
    ints = [b.call(as_int, [b.load(b.gep(objects, [int64(i)]))]) for i in range(count)]
    code = b.inttoptr(b.call(as_int, [this]), ir.FunctionType(int64, [int64] * count).as_pointer())
    state = b.call(save_thread, [])
    result = b.call(code, ints)
    b.call(restore_thread, [state])
    b.ret(b.call(as_object, [result]))
    return str(module)
