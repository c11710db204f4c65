"""Compiling by Numba, and what it has compiled for callers of other types than numbers: kept on disk, too.

Loaded for the first function that is compiled, or that Python calls with arrays; it loads Numba.
"""

from __future__ import annotations

import copy
import functools
import pickle
import types
from collections.abc import Callable
from dataclasses import dataclass
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
from onchip.kernels.cpu.compiler import jit
from onchip.kernels.cpu.compiler.compile_ahead import WAIT_S, lock_function, unlock_function
from onchip.kernels.cpu.compiler.kernel_compiler import InlinedCompiler, KernelCompiler
from onchip.kernels.cpu.compiler.notice import notice

_OPTIONS = {"error_model": "numpy"}


class _KernelCache(NullCache):  # type: ignore[misc]
    """The compiled versions of a function, one entry each; in the place of Numba's own cache."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        # Not all of target_context.refresh(), as in Numba's own cache: what is compiled needs no registry of what can
        # be, and loading them takes 0.3 s. Compiling refreshes by itself.
        rtsys.initialize(target_context)
        folder, key = jit.cache_folder(), jit.key_of(self.function, repr(signature))
        kept = read_entry(folder, key)
        if kept is None:
            jit.make_needed(self.function)
            if lock_function(folder, key, WAIT_S):
                kept = read_entry(folder, key)  # another process may have made it meanwhile
            if kept is None:
                jit.compiling.append(self.function)
                return None
            notice.finish_one()
            unlock_function(folder, key)
        for called in jit.linked_below(self.function):
            called.link()  # code from the disk holds their symbols
        return CompileResult._rebuild(target_context, *pickle.loads(kept))

    def save_overload(self, signature: Any, result: Any) -> None:
        jit.compiling.pop()
        notice.finish_one()
        folder, key = jit.cache_folder(), jit.key_of(self.function, repr(signature))
        if not result.library.has_dynamic_globals:  # addresses in this process
            write_entry(folder, key, dumps(result._reduce()))
        unlock_function(folder, key)


def inlined(function: Callable[..., Any], is_inline: bool) -> Any:
    """A function for other compiled ones."""
    only_inside = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    made = numba.njit(**_OPTIONS, **only_inside, forceinline=is_inline, pipeline_class=InlinedCompiler)(function)
    template = made.get_call_template

    def get_call_template(args: Any, kws: Any) -> Any:
        """For an int that is known, too: else it would be compiled once more for each."""
        return template([numba.types.unliteral(kind) for kind in args], kws)

    made.get_call_template = get_call_template
    return made


def called(function: Callable[..., Any]) -> Any:
    """A function for Python."""
    made = numba.njit(**_OPTIONS, nogil=True, pipeline_class=KernelCompiler)(function)
    made._cache = _KernelCache(function)
    return made


@dataclass(frozen=True)
class LinkedCode:
    """A function that was compiled by itself: as an object file, and where it lies in this process."""

    address: int
    name: str
    needs: list[str]  # names that are defined elsewhere
    code: bytes  # none if it holds addresses in this process
    owner: Any  # keeps it in memory


class _PlainContext(CPUContext):  # type: ignore[misc]
    """For functions that raise nothing. Numba's own wrapper asks what a function raised and tells Python, by code that
    is nowhere without Numba."""

    def create_cfunc_wrapper(self, library: Any, fndesc: Any, env: Any, call_helper: Any) -> None:
        module = self.create_module("plain_wrapper")
        inner_type = self.call_conv.get_function_type(fndesc.restype, fndesc.argtypes)
        inner = ir.Function(module, inner_type, fndesc.llvm_func_name)
        kinds = [self.get_value_type(kind) for kind in fndesc.argtypes]
        writes = self.get_value_type(fndesc.restype) if fndesc.restype is not numba.void else ir.VoidType()
        wrapper = ir.Function(module, ir.FunctionType(writes, kinds), fndesc.llvm_cfunc_wrapper_name)
        b = ir.IRBuilder(wrapper.append_basic_block())
        _, made = self.call_conv.call_function(b, inner, fndesc.restype, fndesc.argtypes, wrapper.args)
        if fndesc.restype is numba.void:
            b.ret_void()
        else:
            b.ret(made)
        library.add_ir_module(module)


@functools.cache
def _target() -> Any:
    context = copy.copy(cpu_target.target_context)
    context.__class__ = _PlainContext
    return types.SimpleNamespace(
        options=cpu_target.options, typing_context=cpu_target.typing_context, target_context=context
    )


def compile_linked(function: Callable[..., Any], argument_types: tuple[Any, ...], writes: Any) -> LinkedCode:
    """gives: the type of what it returns, or numba.void"""
    # It has no arrays but those at addresses: nobody counts who uses one, in what it swallows either.
    options = {**_OPTIONS, "_nrt": False}
    made: Any = CFunc(function, (argument_types, writes), locals={}, options=options, pipeline_class=KernelCompiler)
    made._compiler.targetdescr = _target()
    made.compile()
    _, _, (code, _) = made._library.serialize_using_object_code()
    code = b"" if made._library.has_dynamic_globals else code
    module = made._library._final_module
    named = (*module.global_variables, *module.functions)
    needs = [each.name for each in named if each.is_declaration and not each.name.startswith("llvm.")]
    return LinkedCode(made.address, made.native_name, needs, code, made)
