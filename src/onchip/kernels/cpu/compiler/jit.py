"""How the CPU kernels are compiled: Numba, cached on disk, never stale.

Numba's own cache looks only at a function's file, so it misses an edit to a helper in another file; and it unpickles
any file it finds. Here the key has a digest of all sources, and entries are checked. Functions of ints and floats are
cached as machine code, which loads without Numba (`compiler/machine_code.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir

from onchip.cache import private_folder
from onchip.kernels.cpu.compiler.compile_ahead import (
    compile_together,
    lock_function,
    queued_functions,
    start_helper,
    unlock_function,
)  # fmt: skip
from onchip.kernels.cpu.compiler.late_numba import LateFunction, TypeName, cgutils, intrinsic, types
from onchip.kernels.cpu.compiler.machine_code import load_code, python_function, store_code, versions
from onchip.kernels.cpu.compiler.notice import notice
from onchip.kernels.vectors import HAS_FMA

F = TypeVar("F", bound=Callable[..., Any])

ALL = 1 << 40  # the length of an array whose end is not used


@functools.cache
def _source_digest(folder: Path, pattern: str = "*.py") -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.glob(pattern)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def cache_folder() -> Path | None:
    return private_folder("numba")


def key_of(function: Callable[..., Any], signature: str) -> str:
    """The cache key of a compiled function: a digest of all that its code depends on."""
    code, kernels = function.__code__, Path(__file__).parents[1]
    this_folder, shared = Path(code.co_filename).parent, kernels.parent
    sources = [_source_digest(kernels, "**/*.py"), _source_digest(shared), _source_digest(this_folder)]
    name = (function.__module__, function.__qualname__, code.co_firstlineno)
    closure = [_stable(cell.cell_contents) for cell in function.__closure__ or ()]
    return hashlib.sha256(repr((sources, versions(), name, signature, closure)).encode()).hexdigest()


def _stable(value: Any) -> Any:
    """A representation that is the same in every process. A function, whose source is digested, is its name."""
    if isinstance(value, CompiledFunction | LinkedFunction | LateFunction):
        return value.__module__, value.__qualname__
    if value is None or isinstance(value, int | float | str | np.generic):
        return value
    if isinstance(value, tuple | list):
        return [_stable(each) for each in value]
    from numba.core.serialize import dumps

    return dumps(value)


class CompiledFunction:
    """A function compiled for the types of each call. Compiled code inlines it; Python calls a separate version."""

    def __init__(self, function: Callable[..., Any], is_inline: bool) -> None:
        functools.update_wrapper(self, function)
        self.py_func, self.is_inline = function, is_inline

    @functools.cached_property
    def dispatcher(self) -> Any:
        from onchip.kernels.cpu.compiler.numba_cache import inlined

        return inlined(self.py_func, self.is_inline)

    @functools.cached_property
    def _called(self) -> Any:
        from onchip.kernels.cpu.compiler.numba_cache import CacheHooks, called

        return called(self.py_func, CacheHooks(cache_folder, key_of, compile_needed, linked_below, compiling))

    def __call__(self, *args: Any) -> Any:
        return self._called(*args)

    def __getattr__(self, name: str) -> Any:
        """For Numba, which uses it as the dispatcher."""
        return getattr(self.dispatcher, name)


def compiled(*, inline: bool = False) -> Callable[[F], F]:
    """Decorate a function: nopython, no GIL, IEEE arithmetic (no reordering, no contraction), cached on disk.

    inline  LLVM inlines it whatever its size, so that loops over it are vectorised
    """

    def decorate(function: F) -> F:
        return CompiledFunction(function, inline)  # type: ignore[return-value]

    return decorate


class LinkedFunction(LateFunction):
    """A function of ints and floats that is compiled separately, once, when it is first needed."""

    def __init__(self, function: Callable[..., Any], argument_types: tuple[Any, ...], writes: Any = None) -> None:
        super().__init__(self._make_call, function.__name__)
        self.__module__, self.__qualname__ = function.__module__, function.__qualname__
        self.function, self.argument_types, self.writes = function, argument_types, writes
        self.symbol = f"onchip_{function.__module__}_{function.__name__}".replace(".", "_")
        self.address: int | None = None
        _BY_SYMBOL[self.symbol] = self

    def link(self) -> int:
        """Its address; from now on kernels that call it can be loaded."""
        if not self.is_loaded():
            compile_needed(self)
        assert self.address is not None
        return self.address

    def is_loaded(self) -> bool:
        """Whether it is compiled; loads it from the cache."""
        if self.address is None:
            self._set_address(load_code(cache_folder(), self.key, _load_symbols))
        return self.address is not None

    def try_compile(self, force: bool) -> bool:
        """Load or compile it; False if a dependency is missing, or another process has locked it (unless `force`)."""
        if self.is_loaded():
            return True
        folder = cache_folder()
        if not all(callee.is_loaded() for callee in self.below) or not (lock_function(folder, self.key) or force):
            return False
        try:
            if not self.is_loaded():  # another process may have compiled it meanwhile
                self._compile(folder)
        finally:
            unlock_function(folder, self.key)
        return True

    @functools.cached_property
    def key(self) -> str:
        return key_of(self.function, f"{', '.join(_type_names(self.argument_types))} -> {self.writes}")

    @functools.cached_property
    def below(self) -> list[LinkedFunction]:
        """The linked functions that it calls, directly or not."""
        return linked_below(self)[:-1]

    @functools.cached_property
    def size(self) -> int:
        """Bytes of Python bytecode, with inlined functions: an estimate of the time to compile it."""
        return _size(self.function)

    def _set_address(self, address: int | None) -> None:
        if address is not None:
            self.address = address
            llvm.add_symbol(self.symbol, address)  # resolved by name, so kernels can be cached

    def _compile(self, folder: Path | None) -> None:
        from onchip.kernels.cpu.compiler.numba_cache import compile_linked

        argument_types, writes = map(_resolved, self.argument_types), _resolved(self.writes or types.void)
        with compiling_now(self.function):
            linked_code = compile_linked(self.function, tuple(argument_types), writes)
        _OWNERS.append(linked_code)
        self._set_address(linked_code.address)
        if linked_code.code:
            store_code(folder, self.key, linked_code.name, linked_code.needs, linked_code.code)

    def _make_call(self) -> Any:
        """The intrinsic by which compiled code calls it."""
        signature, function = _resolved(types.void)(*map(_resolved, self.argument_types)), self.function

        def call(typing_context: Any, *args: Any) -> Any:
            self.link()

            def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                kinds = [context.get_value_type(kind) for kind in signature.args]
                kind = ir.FunctionType(ir.VoidType(), kinds)
                builder.call(cgutils.get_or_insert_function(builder.module, kind, self.symbol), args)
                return context.get_dummy_value()

            return signature, codegen

        call.__name__ = function.__name__
        call.__signature__ = _signature(function.__code__.co_varnames[: len(self.argument_types)])  # type: ignore[attr-defined]
        return importlib.import_module("numba.extending").intrinsic(call)


def _signature(names: Iterable[str]) -> inspect.Signature:
    """The signature that Numba needs for an intrinsic with *args."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature([inspect.Parameter(name, kind) for name in ("context", *names)])


compiling: list[Callable[..., Any]] = []  # the function being compiled, last, after those that need it


@contextlib.contextmanager
def compiling_now(function: Callable[..., Any]) -> Iterator[None]:
    depth = len(compiling)
    compiling.append(function)
    try:
        yield
    finally:
        del compiling[depth:]


def compile_needed(function: Any) -> None:
    """Compile a function's dependencies, itself if it is linked, and queued functions, with a helper process."""
    queued = [] if compiling else queued_functions()  # while compiling, only dependencies
    missing = [each for each in all_linked_below([function, *queued]) if not each.is_loaded()]
    is_linked = isinstance(function, LinkedFunction)
    count = len(missing) + (not is_linked)
    notice.expect(count, start_helper(function.function if is_linked else function, cache_folder(), count))
    from onchip.kernels.cpu.compiler.numba_cache import global_compiler_lock  # late: loading Numba is slow

    with global_compiler_lock:
        compile_together(missing)


_BY_SYMBOL: dict[str, LinkedFunction] = {}
_OWNERS: list[Any] = []  # owners of compiled code
_OBJECT_BYTES = object.__basicsize__


def _type_names(kinds: Sequence[Any]) -> list[str]:
    """Type names, the same whether or not Numba was loaded when they were written."""
    return ["bool" if str(kind) == "boolean" else str(kind) for kind in kinds]


def _resolved(kind: Any) -> Any:
    return kind.real() if isinstance(kind, TypeName) else kind


def _load_symbols(symbols: Sequence[str]) -> bool:
    """Load the linked functions with these symbols; whether all symbols are resolved."""
    if not all(_BY_SYMBOL[symbol].is_loaded() for symbol in symbols if symbol in _BY_SYMBOL):
        return False
    missing = [symbol for symbol in symbols if llvm.address_of_symbol(symbol) is None]
    if missing:  # Numba's
        importlib.import_module("numba.core.registry").cpu_target.target_context.refresh()
        return all(llvm.address_of_symbol(symbol) is not None for symbol in missing)
    return True


def linked(*argument_types: Any) -> Callable[[F], F]:
    """Decorate a function that is compiled separately, once, and that kernels call by its symbol.

    A kernel inlines every `compiled` function it calls, as do its callers, and all of it is optimised again each time:
    conv_fused took 34 s to compile that way. A linked function accepts ints and floats only (an array is passed as its
    address: `floats_at`), returns nothing and raises nothing. It is compiled or loaded when the first kernel that calls
    it is compiled, or by `address_of`.
    """

    def decorate(function: F) -> F:
        return LinkedFunction(function, argument_types)  # type: ignore[return-value]

    return decorate


def address_of(function: Any) -> int:
    """The address of a linked function's code."""
    return function.link()  # type: ignore[no-any-return]


class EntryFunction(LinkedFunction):
    """A function of ints that returns an int, for Python to call."""

    @functools.cached_property
    def load(self) -> Callable[..., int]:
        """The same as a built-in function, which is faster to call."""
        return python_function(self.__name__, self.link(), len(self.argument_types), cache_folder())

    def __call__(self, *ints: int) -> int:
        return self.load(*ints)


def entry(function: Callable[..., int]) -> EntryFunction:
    """Decorate a function of ints that Python calls, compiled separately, once; it runs without the GIL."""
    count = function.__code__.co_argcount
    return EntryFunction(function, (types.int64,) * count, types.int64)


def linked_below(function: Any) -> list[LinkedFunction]:
    """The linked functions that a function needs, itself if it is one; each once, dependencies first."""
    plain = function.function if isinstance(function, LinkedFunction) else getattr(function, "py_func", function)
    found = {inner: None for called in _called(plain) for inner in linked_below(called)}
    return [*found, function] if isinstance(function, LinkedFunction) else list(found)


def all_linked_below(functions: Sequence[Any]) -> list[LinkedFunction]:
    return list({each: None for function in functions for each in linked_below(function)})


def _size(function: Callable[..., Any]) -> int:
    inlined = (called for called in _called(function) if not isinstance(called, LinkedFunction))
    return len(function.__code__.co_code) + sum(map(_size, inlined))


def _called(function: Callable[..., Any]) -> Iterator[LinkedFunction | Callable[..., Any]]:
    """The linked and `compiled` functions that a function calls by a global or closure name; calls as attributes of a
    module are not found."""
    names, cells = function.__code__.co_names, function.__closure__ or ()
    for called in (*map(function.__globals__.get, names), *(cell.cell_contents for cell in cells)):
        if isinstance(called, LinkedFunction):
            yield called
        elif isinstance(called, CompiledFunction):
            yield called.py_func
        elif isinstance(called, LateFunction) and called.needs is not None:
            yield called.needs


def code_call(count: int) -> Any:
    """An intrinsic that calls the code at an address, its first argument, with `count` ints."""

    def call(typing_context: Any, *args: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * count)
            builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
            return context.get_dummy_value()

        return types.void(*(types.int64,) * (count + 1)), codegen

    call.__signature__ = _signature(["code", *(f"argument_{i}" for i in range(count))])  # type: ignore[attr-defined]
    return intrinsic(call)


# Arrays at addresses are built in LLVM: Numba would copy and type a Python function again at every call site.


def build_array(context: Any, builder: Any, kind: Any, ptr: Any, shape: Sequence[Any]) -> Any:
    """In LLVM: the array of Numba's type `kind` at an address."""
    array, step = context.make_array(kind)(context, builder), ir.IntType(64)(kind.dtype.bitwidth // 8)
    strides = [step]
    for size in reversed(shape[1:]):
        strides.insert(0, builder.mul(strides[0], size))
    importlib.import_module("numba.np.arrayobj").populate_array(
        array, builder.inttoptr(ptr, array.data.type), shape, strides, itemsize=step, meminfo=None
    )
    return array._getvalue()


def array_at(dtype: Any) -> tuple[Any, Callable[..., Any]]:
    """For an intrinsic: its signature and code, which build an array of this dtype from an address and a count."""
    kind = types.Array(dtype, 1, "C")

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return build_array(context, builder, kind, args[0], args[1:])

    return kind(types.int64, types.int64), codegen


@intrinsic
def floats_at(typing_context: Any, ptr: Any, count: Any) -> Any:
    """The float32 array of `count` elements at an address."""
    return array_at(types.float32)


@intrinsic
def doubles_at(typing_context: Any, ptr: Any, count: Any) -> Any:
    return array_at(types.float64)


@intrinsic
def ints_at(typing_context: Any, ptr: Any, count: Any) -> Any:
    return array_at(types.int64)


@intrinsic
def bytes_at(typing_context: Any, ptr: Any, count: Any) -> Any:
    return array_at(types.uint8)


@intrinsic
def int_at(typing_context: Any, ptr: Any) -> Any:
    """The 64-bit integer at an address: compiles faster than an array of one."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], ir.IntType(64).as_pointer()))

    return types.int64(types.int64), codegen


@intrinsic
def int32_at(typing_context: Any, ptr: Any) -> Any:
    """The 32-bit integer at an address, as int64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sext(builder.load(builder.inttoptr(args[0], ir.IntType(32).as_pointer())), ir.IntType(64))

    return types.int64(types.int64), codegen


class _Address(CompiledFunction):
    def __call__(self, array: Any) -> int:
        """From Python; three times as fast as array.ctypes.data."""
        return ctypes.c_int64.from_address(id(array) + _OBJECT_BYTES).value


def _data(array: Any) -> int:
    """An array's address. Signed, as all address arithmetic here: Numba converts mixed signs to floats."""
    return np.int64(array.ctypes.data)  # type: ignore[return-value]


address = _Address(_data, is_inline=True)


@compiled(inline=True)
def data_of(array: int) -> int:
    """The address of an array's data, from its `id` in Python: the fastest way, for any dtype.

    It is the first field of PyArrayObject after the object header. The caller must keep the array alive.
    """
    return int_at(array + _OBJECT_BYTES)  # type: ignore[no-any-return]


@intrinsic
def multiply_add(typing_context: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z in float32, as an FMA where the CPU has one; loops of it are vectorised."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if not HAS_FMA:
            return builder.fadd(builder.fmul(args[0], args[1]), args[2])
        kind = ir.FunctionType(ir.FloatType(), [ir.FloatType()] * 3)
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.f32"), args)

    return types.float32(*(types.float32,) * 3), codegen


@intrinsic
def prefetch(typing_context: Any, ptr: Any) -> Any:
    """Prefetch the cache line at an address; an invalid address does no harm."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, *(ir.IntType(32),) * 3])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        to_read, keep, data = (ir.IntType(32)(number) for number in (0, 3, 1))
        builder.call(function, [builder.inttoptr(args[0], cgutils.voidptr_t), to_read, keep, data])
        return context.get_dummy_value()

    return types.void(types.int64), codegen
