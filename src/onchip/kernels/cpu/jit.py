"""How the CPU kernels are compiled: Numba, cached on disk, never stale.

Numba's own cache looks only at the file a function stands in, so an edit to a helper in another file goes
unseen; and it unpickles whatever it finds. Here the key has a digest of all sources, and entries are checked.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.caching import NullCache
from numba.core.ccallback import CFunc
from numba.core.compiler import CompileResult
from numba.core.dispatcher import Dispatcher
from numba.core.runtime import rtsys
from numba.core.serialize import dumps
from numba.extending import intrinsic

from onchip.cache import private_folder, read_entry, say_compiling, write_entry
from onchip.kernels.cpu.compile_ahead import lock_function, start_helper, unlock_function
from onchip.kernels.cpu.vector_loops import KernelCompiler
from onchip.kernels.vectors import HAS_FMA

F = TypeVar("F", bound=Callable[..., Any])

ALL = 1 << 40  # the length of an array whose end nobody asks for


@functools.cache
def _source_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def cache_folder() -> Path | None:
    return private_folder("numba")


class _KernelCache(NullCache):  # type: ignore[misc]
    """The compiled versions of a function, one entry each; in the place of Numba's own cache."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        # Not all of target_context.refresh(), as in Numba's own cache: what is compiled needs no registry of what can
        # be, and loading them takes 0.3 s. Compiling refreshes by itself.
        rtsys.initialize(target_context)
        folder, key = cache_folder(), self._key(signature, target_context.codegen())
        kept = read_entry(folder, key)
        if kept is None:
            say_compiling()
            start_helper(self.function, folder)
            if lock_function(folder, key):
                kept = read_entry(folder, key)  # another process may have made it meanwhile
        if kept is None:
            return None
        unlock_function(folder, key)
        _link_callees(self.function)
        return CompileResult._rebuild(target_context, *pickle.loads(kept))

    def save_overload(self, signature: Any, result: Any) -> None:
        folder, key = cache_folder(), self._key(signature, result.codegen)
        if not result.library.has_dynamic_globals:  # addresses in this process
            write_entry(folder, key, dumps(result._reduce()))
        unlock_function(folder, key)

    def _key(self, signature: Any, codegen: Any) -> str:
        function, code = self.function, self.function.__code__
        here = Path(__file__).parent
        sources = [_source_digest(folder) for folder in (here, here.parent, Path(code.co_filename).parent)]
        versions = (numba.__version__, sys.version, codegen.magic_tuple())  # the last: the processor
        name = (function.__module__, function.__qualname__, code.co_firstlineno)
        closure = dumps([_lasting(cell.cell_contents) for cell in function.__closure__ or ()])
        return hashlib.sha256(repr((sources, versions, name, signature, closure)).encode()).hexdigest()


def _lasting(value: Any) -> Any:
    """The same in every process. A compiled function, whose source is digested, is its name: pickled, it has a number
    that is drawn anew each time."""
    function = getattr(value, "py_func", None)
    return value if function is None else (function.__module__, function.__qualname__)


def compiled(*, inline: bool = False) -> Callable[[F], F]:
    """Decorate a kernel: nopython, no GIL, IEEE arithmetic (no reordering, no contraction), cached on disk."""

    def decorate(function: F) -> F:
        options = {"nogil": True, "error_model": "numpy", "inline": "always" if inline else "never"}
        made = numba.njit(**options, pipeline_class=KernelCompiler)(function)
        made._cache = _KernelCache(function)
        return made  # type: ignore[no-any-return]

    return decorate


class LinkedFunction:
    """A function that is compiled by itself, once, when it is first asked for."""

    def __init__(self, function: Callable[..., Any], argument_types: tuple[Any, ...]) -> None:
        self.function, self.argument_types = function, argument_types
        self.symbol = f"onchip_{function.__module__}_{function.__name__}".replace(".", "_")

        self.made: Any = None

    def link(self) -> int:
        """Where its code lies; from now on kernels that call it can be loaded."""
        if self.made is None:
            signature, options = (self.argument_types, types.void), {"error_model": "numpy"}
            made = CFunc(self.function, signature, locals={}, options=options, pipeline_class=KernelCompiler)
            made._cache = _KernelCache(self.function)  # type: ignore[attr-defined]  # numba.cfunc compiles before that
            made.compile()
            llvm.add_symbol(self.symbol, made.address)  # found by name, so kernels can be cached
            self.made = made
            _LINKED.append(made)
        return int(self.made.address)


_LINKED: list[Any] = []  # kept: their code lives as long as they do
_OBJECT_BYTES = object.__basicsize__


def linked(*argument_types: Any) -> Callable[[F], F]:
    """Decorate a function that is compiled by itself, once, and that kernels call by its symbol.

    A kernel swallows the code of every `compiled` function it calls, as do those that call it, and all of it is
    optimised again each time: conv_fused took 34 s to compile that way. A linked function takes numbers only (an array
    is passed as its address: `floats_at`), returns nothing and raises nothing. It is compiled, or loaded, for the first
    kernel that calls it by its name; or for who asks for its address (`address_of`).
    """

    def decorate(function: F) -> F:
        signature, made = types.void(*argument_types), LinkedFunction(function, argument_types)

        def call(typing_context: Any, *args: Any) -> Any:
            made.link()

            def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                kinds = [context.get_value_type(kind) for kind in argument_types]
                kind = ir.FunctionType(ir.VoidType(), kinds)
                builder.call(cgutils.get_or_insert_function(builder.module, kind, made.symbol), args)
                return context.get_dummy_value()

            return signature, codegen

        call.__name__ = function.__name__
        context_and_arguments = [inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
        context_and_arguments += inspect.signature(function).parameters.values()
        call.__signature__ = inspect.Signature(context_and_arguments)  # type: ignore[attr-defined]  # Numba asks for it
        called = intrinsic(call)
        called.linked = made
        return called  # type: ignore[no-any-return]

    return decorate


def address_of(function: Any) -> int:
    """Where the code of a linked function lies."""
    return function.linked.link()  # type: ignore[no-any-return]


def _link_callees(function: Callable[..., Any]) -> None:
    """Compile, or load, the linked functions that a function calls, itself or by `compiled` ones: code from the disk
    holds their symbols."""
    for called in _called(function):
        if isinstance(called, LinkedFunction):
            called.link()
        else:
            _link_callees(called)


def linked_below(function: Any) -> list[LinkedFunction]:
    """The linked functions that one needs, itself if it is one; each once, behind those that it needs."""
    itself = function if isinstance(function, LinkedFunction) else getattr(function, "linked", None)
    plain = itself.function if itself else getattr(function, "py_func", function)
    found = {inner: None for called in _called(plain) for inner in linked_below(called)}
    return [*found, itself] if itself else list(found)


def _called(function: Callable[..., Any]) -> Iterator[LinkedFunction | Callable[..., Any]]:
    """The linked functions and the `compiled` ones that a function calls. They are called by global names; nobody
    calls them as attributes of a module."""
    names, cells = function.__code__.co_names, function.__closure__ or ()
    for called in (*map(function.__globals__.get, names), *(cell.cell_contents for cell in cells)):
        if hasattr(called, "linked"):
            yield called.linked
        elif isinstance(called, Dispatcher):
            yield called.py_func


@intrinsic  # type: ignore[untyped-decorator]
def pointer(typing_context: Any, where: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), codegen


@compiled(inline=True)
def floats_at(where: int, count: int) -> Any:
    """The float32 array of `count` numbers at an address."""
    return numba.carray(pointer(where), (count,), np.float32)


@compiled(inline=True)
def ints_at(where: int, count: int) -> Any:
    return numba.carray(pointer(where), (count,), np.int64)


@intrinsic  # type: ignore[untyped-decorator]
def int_at(typing_context: Any, where: Any) -> Any:
    """The 64-bit integer at an address: quicker to compile than an array of one."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], ir.IntType(64).as_pointer()))

    return types.int64(types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def int32_at(typing_context: Any, where: Any) -> Any:
    """The 32-bit integer at an address, as one of 64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sext(builder.load(builder.inttoptr(args[0], ir.IntType(32).as_pointer())), ir.IntType(64))

    return types.int64(types.int64), codegen


@compiled(inline=True)
def bytes_at(where: int, count: int) -> Any:
    return numba.carray(pointer(where), (count,), np.uint8)


@compiled(inline=True)
def address(array: Any) -> int:
    """Where an array begins. Signed, as all address arithmetic here: Numba turns a mix of signs into floats.

    From Python, too: array.ctypes.data takes three times as long.
    """
    return np.int64(array.ctypes.data)  # type: ignore[return-value]


@compiled(inline=True)
def data_of(array: int) -> int:
    """Where an array begins, of its `id` in Python: the quickest way from there, whatever its type.

    It is the first field behind an object's own (PyArrayObject). The caller keeps the array.
    """
    return int_at(array + _OBJECT_BYTES)  # type: ignore[no-any-return]


@intrinsic  # type: ignore[untyped-decorator]
def multiply_add(typing_context: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z in float32, rounded once where the machine can; loops of it become vector code."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if not HAS_FMA:
            return builder.fadd(builder.fmul(args[0], args[1]), args[2])
        kind = ir.FunctionType(ir.FloatType(), [ir.FloatType()] * 3)
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.f32"), args)

    return types.float32(*(types.float32,) * 3), codegen


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(typing_context: Any, where: Any) -> Any:
    """Ask for the cache line at an address; nobody waits for it, and a wrong address does no harm."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, *(ir.IntType(32),) * 3])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        to_read, keep, data = (ir.IntType(32)(number) for number in (0, 3, 1))
        builder.call(function, [builder.inttoptr(args[0], cgutils.voidptr_t), to_read, keep, data])
        return context.get_dummy_value()

    return types.void(types.int64), codegen
