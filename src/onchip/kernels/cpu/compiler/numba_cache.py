"""Compiling with Numba, and the disk cache of functions that are called with arrays.

Imported, and Numba with it, when the first function is compiled, or called from Python with arrays.
"""

from __future__ import annotations

import copy
import functools
import pickle
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numba
from llvmlite import ir
from numba.core.caching import NullCache
from numba.core.ccallback import CFunc
from numba.core.compiler import CompileResult
from numba.core.compiler_lock import global_compiler_lock as global_compiler_lock
from numba.core.cpu import CPUContext
from numba.core.registry import cpu_target
from numba.core.runtime import rtsys
from numba.core.serialize import dumps

from onchip.cache import read_entry, write_entry
from onchip.kernels.cpu.compiler.compile_ahead import WAIT_S, lock_function, unlock_function
from onchip.kernels.cpu.compiler.kernel_compiler import FULL_WIDTH, InlinedCompiler, KernelCompiler
from onchip.kernels.cpu.compiler.notice import notice

_OPTIONS = {"error_model": "numpy"}


@dataclass(frozen=True)
class CacheHooks:
    """Functions of jit.py, which loads this module late."""

    folder: Callable[[], Path | None]
    key_of: Callable[[Callable[..., Any], str], str]
    compile_needed: Callable[[Any], None]
    linked_below: Callable[[Any], Sequence[Any]]
    compiling: list[Callable[..., Any]]


class _KernelCache(NullCache):  # type: ignore[misc]
    """One cache entry per compiled version of a function; replaces Numba's own cache."""

    def __init__(self, function: Callable[..., Any], hooks: CacheHooks) -> None:
        self.function, self.hooks = function, hooks

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        # Not target_context.refresh(), as in Numba's cache: compiled code needs no registries, and loading them takes
        # 0.3 s. Compiling refreshes by itself.
        rtsys.initialize(target_context)
        folder, key = self.hooks.folder(), self.hooks.key_of(self.function, repr(signature))
        entry = read_entry(folder, key)
        if entry is None:
            self.hooks.compile_needed(self.function)
            if lock_function(folder, key, WAIT_S):
                entry = read_entry(folder, key)  # another process may have compiled it meanwhile
            if entry is None:
                self.hooks.compiling.append(self.function)
                return None
            notice.finish_one()
            unlock_function(folder, key)
        for called in self.hooks.linked_below(self.function):
            called.link()  # cached code refers to their symbols
        return CompileResult._rebuild(target_context, *pickle.loads(entry))

    def save_overload(self, signature: Any, result: Any) -> None:
        self.hooks.compiling.pop()
        notice.finish_one()
        folder, key = self.hooks.folder(), self.hooks.key_of(self.function, repr(signature))
        if not result.library.has_dynamic_globals:  # addresses in this process
            write_entry(folder, key, dumps(result._reduce()))
        unlock_function(folder, key)


def inlined(function: Callable[..., Any], is_inline: bool) -> Any:
    """A function that other compiled ones inline."""
    only_inside = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    dispatcher = numba.njit(**_OPTIONS, **only_inside, forceinline=is_inline, pipeline_class=InlinedCompiler)(function)
    template = dispatcher.get_call_template

    def get_call_template(args: Any, kws: Any) -> Any:
        """Without literal types: each int literal would compile another version."""
        return template([numba.types.unliteral(kind) for kind in args], kws)

    dispatcher.get_call_template = get_call_template
    return dispatcher


def called(function: Callable[..., Any], hooks: CacheHooks) -> Any:
    """A function for Python."""
    dispatcher = numba.njit(**_OPTIONS, nogil=True, pipeline_class=KernelCompiler)(function)
    dispatcher._cache = _KernelCache(function, hooks)
    return dispatcher


@dataclass(frozen=True)
class LinkedCode:
    """A separately compiled function: its object file, and its address in this process."""

    address: int
    name: str
    needs: list[str]  # undefined symbols
    code: bytes  # empty if it contains addresses in this process
    owner: Any  # keeps the code alive


class _PlainContext(CPUContext):  # type: ignore[misc]
    """For functions that raise nothing. Numba's own wrapper passes exceptions to Python, by code that needs Numba."""

    def create_cfunc_wrapper(self, library: Any, fndesc: Any, env: Any, call_helper: Any) -> None:
        module = self.create_module("plain_wrapper")
        inner_type = self.call_conv.get_function_type(fndesc.restype, fndesc.argtypes)
        inner = ir.Function(module, inner_type, fndesc.llvm_func_name)
        kinds = [self.get_value_type(kind) for kind in fndesc.argtypes]
        writes = self.get_value_type(fndesc.restype) if fndesc.restype is not numba.void else ir.VoidType()
        wrapper = ir.Function(module, ir.FunctionType(writes, kinds), fndesc.llvm_cfunc_wrapper_name)
        set.add(wrapper.attributes, FULL_WIDTH)  # a short function is inlined into it
        b = ir.IRBuilder(wrapper.append_basic_block())
        _, result = self.call_conv.call_function(b, inner, fndesc.restype, fndesc.argtypes, wrapper.args)
        if fndesc.restype is numba.void:
            b.ret_void()
        else:
            b.ret(result)
        library.add_ir_module(module)


@functools.cache
def _target() -> Any:
    context = copy.copy(cpu_target.target_context)
    context.__class__ = _PlainContext
    return types.SimpleNamespace(
        options=cpu_target.options, typing_context=cpu_target.typing_context, target_context=context
    )


def compile_linked(function: Callable[..., Any], argument_types: tuple[Any, ...], writes: Any) -> LinkedCode:
    """writes: the type of its result, or numba.void"""
    # It has only arrays at addresses: no reference counting, in inlined functions either.
    options = {**_OPTIONS, "_nrt": False}
    cfunc: Any = CFunc(function, (argument_types, writes), locals={}, options=options, pipeline_class=KernelCompiler)
    cfunc._compiler.targetdescr = _target()
    cfunc.compile()
    _, _, (code, _) = cfunc._library.serialize_using_object_code()
    code = b"" if cfunc._library.has_dynamic_globals else code
    module = cfunc._library._final_module
    symbols = (*module.global_variables, *module.functions)
    needs = [each.name for each in symbols if each.is_declaration and not each.name.startswith("llvm.")]
    return LinkedCode(cfunc.address, cfunc.native_name, needs, code, cfunc)
