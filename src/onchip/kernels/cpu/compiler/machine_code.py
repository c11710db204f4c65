"""Compiled functions as machine code: kept as object files, loaded by LLVM alone, called from Python as its own are.

Idea    What a warm start needs of a function is where its code lies. Numba's own cache gives it types, bitcode and
        dispatchers back, for which all of Numba is loaded; here an entry is an object file and the names that it needs.
Calls   A function of ints that Python calls is a built-in function: LLVM code takes the ints out of their objects and
        lets other threads run meanwhile. It takes a third of the time of a call by ctypes.
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


@functools.cache
def versions() -> tuple[Any, ...]:
    """What machine code depends on beside its source: compilers, their settings, the processor."""
    found = importlib.util.find_spec("numba")
    assert found is not None
    assert found.origin is not None
    numba = hashlib.sha256((Path(found.origin).parent / "_version.py").read_bytes()).hexdigest()
    settings = sorted((name, value) for name, value in os.environ.items() if name.startswith("NUMBA_"))
    cpu = llvm.get_process_triple(), llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    return numba, llvmlite.__version__, sys.version, settings, cpu


_loading = threading.Lock()
_loaded: dict[str, tuple[int, Any]] = {}  # by key: where it lies, and what keeps it there


def _target_machine() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    return target.create_target_machine(cpu=llvm.get_host_cpu_name(), opt=2, reloc="default", codemodel="jitdefault")


def _load(key: str, name: str, code: bytes) -> int:
    """Each object has a loader to itself: Numba numbers names anew in every process, so two may have the same."""
    with _loading:
        if key not in _loaded:
            engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine())
            engine.add_object_file(llvm.ObjectFileRef.from_data(code))
            engine.finalize_object()
            _loaded[key] = int(engine.get_function_address(name)), engine
        return _loaded[key][0]


def load_code(folder: Path | None, key: str, find: Callable[[Sequence[str]], bool]) -> int | None:
    """Where the code lies that was kept under a key; None where there is none, or it needs what nobody has.

    find  makes sure of the names that the code needs
    """
    kept = read_entry(folder, key)
    if kept is None:
        return None
    head, _, code = kept.partition(b"\n")
    name, *needs = json.loads(head)
    return _load(key, name, code) if find(needs) else None


def keep_code(folder: Path | None, key: str, name: str, needs: Sequence[str], code: bytes) -> None:
    write_entry(folder, key, json.dumps([name, *needs]).encode() + b"\n" + code)


# -- calls from Python -----------------------------------------------------------------------------------------


class _Method(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p), ("function", ctypes.c_void_p), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p)
    )  # fmt: skip


_kept: list[Any] = []  # Python keeps pointers to them


def python_function(name: str, address: int, count: int, folder: Path | None) -> Callable[..., int]:
    """A built-in function of `count` ints for code that takes so many int64 and gives one."""
    method = _Method(name.encode(), _caller(count, folder), _METH_FASTCALL, None)
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p]
    _kept.append(method)
    return make(ctypes.addressof(method), address, None)  # type: ignore[no-any-return]


@functools.cache
def _caller(count: int, folder: Path | None) -> int:
    """Code that calls code of `count` int64 for Python. It is told where that lies as the `self` of a method."""
    for name in _PYTHON:
        llvm.add_symbol(name, ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value)
    source, name = Path(__file__).read_bytes(), f"onchip_call_{count}"
    key = hashlib.sha256(repr((source, versions(), name)).encode()).hexdigest()
    found = load_code(folder, key, lambda needs: True)
    if found is None:
        code = _target_machine().emit_object(llvm.parse_assembly(_caller_source(name, count)))
        keep_code(folder, key, name, [], code)
        found = _load(key, name, code)
    return found


def _caller_source(name: str, count: int) -> str:
    """All pointers are ints: then it is the same for every version of LLVM."""
    from llvmlite import ir

    word = ir.IntType(64)
    module = ir.Module()
    as_int, as_object, leave, back = (
        ir.Function(module, ir.FunctionType(word if writes else ir.VoidType(), [word] * takes), symbol)
        for symbol, takes, writes in zip(_PYTHON, (1, 1, 0, 1), (True, True, True, False), strict=True)
    )
    function = ir.Function(module, ir.FunctionType(word, [word] * 3), name)
    b = ir.IRBuilder(function.append_basic_block())
    this, arguments, _ = function.args
    objects = b.inttoptr(arguments, word.as_pointer())
    numbers = [b.call(as_int, [b.load(b.gep(objects, [word(i)]))]) for i in range(count)]
    code = b.inttoptr(b.call(as_int, [this]), ir.FunctionType(word, [word] * count).as_pointer())
    state = b.call(leave, [])
    made = b.call(code, numbers)
    b.call(back, [state])
    b.ret(b.call(as_object, [made]))
    return str(module)
